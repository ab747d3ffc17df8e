"""Descriptions of errors in the program or in user code."""

from __future__ import annotations

import contextlib
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from ringtrain.errors import UsageError
from ringtrain.messages.hiding import describe_hiding

GRAPH_ERROR = "Graph execution error:"  # frames follow; the last line is the cause
USERS_CODE = "in user code:"  # AutoGraph: frames of two lines, then the error
KERAS_ERROR = "Exception encountered when calling"  # for a layer; the cause follows, in bold
FRAME = re.compile(r'File ".*", line \d+, in ')
BOLD = re.compile(r"\x1b\[\d+m")
INSTALLED = ("/site-packages/", "/dist-packages/")
_FOREIGN = (str(Path(__file__).resolve().parents[1]), sysconfig.get_path("stdlib"), "<")
FUNCTION_NODE = re.compile(r"\{\{function_node .*?\}\} ?")  # TensorFlow's operation names


def describe_defect(error: BaseException) -> str:
    """Return the cause in one line, from messages of TensorFlow, AutoGraph and Keras."""
    lines = [line.strip() for line in strip_nodes(str(error)).splitlines()]
    said = [line for line in lines if line and not line.startswith("[[")] or [""]
    kind = f"{type(error).__name__}: "
    if said[0] == USERS_CODE:
        last_frame = max((number for number, line in enumerate(said) if FRAME.match(line)), default=-2)
        said, kind = said[last_frame + 2 :] or [USERS_CODE], ""  # includes the kind
    if KERAS_ERROR in said[0]:
        return kind + " ".join(BOLD.sub("", line) for line in said[:2])
    return kind + (said[-1] if said[0] == GRAPH_ERROR else said[0])


def describe_failed_import(error: BaseException) -> str:
    return describe_hiding(error) or describe_defect(error).rstrip(".")


@contextlib.contextmanager
def explaining_import(command: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UsageError(
            f"what {command} needs cannot be loaded: {describe_failed_import(error)}. See python -m ringtrain doctor.",
            reach="node",
        ) from error


def strip_nodes(text: str) -> str:
    return FUNCTION_NODE.sub("", text)


def format_defect(error: BaseException) -> str:
    """For user code, from its first frame."""
    if error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__):
        return "".join(traceback.format_exception(error))
    frames = traceback.extract_tb(error.__traceback__)
    first = next((number for number, frame in enumerate(frames) if is_users_own(frame.filename)), 0)
    shown = traceback.format_list(frames[first:])
    return "".join(["Traceback (most recent call last):\n", *shown, *traceback.format_exception_only(error)])


def is_users_own(file: str) -> bool:
    """True for code outside ringtrain, Python and installed packages."""
    return not file.startswith(_FOREIGN) and not any(folder in file for folder in INSTALLED)


def find_users_place(error: BaseException) -> str:
    """Return ``FILE:LINE`` of user code called by ringtrain; empty if none."""
    return find_own_frame(traceback.extract_tb(error.__traceback__))


def find_own_frame(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost."""
    ours = max((number for number, frame in enumerate(frames) if frame.filename.startswith(_FOREIGN[0])), default=0)
    own = [frame for frame in frames[ours:] if is_users_own(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""
