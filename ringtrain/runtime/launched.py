"""Messages of a run to its launcher: its directory, and its end.

Launchers blur exit codes, and print after the ranks have. Whoever starts a run and wants to know (``launch local``, the
batch scripts of ``launch slurm``) names a directory in the environment; the run leaves two files there, each written
whole or not at all. The first word about the end stands: what comes later is what the first failure led to.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain.files.bounded import parse_json, read_bounded

DIRECTORY_VARIABLE = "RINGTRAIN_LAUNCH_DIR"
SUPERVISOR_VARIABLE = "RINGTRAIN_LAUNCH_PID"  # the process of ``launch local``, whose terminal is the user's
LEFT_VARIABLE = "RINGTRAIN_LAUNCH_LEFT"  # names the file that one rank makes when it has done all that it is to do
RUN_FILE, END_FILE, SIGNAL_FILE = "run.json", "end.json", "signal"
MAX_BYTES = 2**20
NO_WORD = (OSError, ValueError, KeyError, TypeError)  # there is no such file, or it holds something else


class RunTold(NamedTuple):
    """The run directory that rank 0 has opened."""

    path: Path  # absolute
    step: int  # of the checkpoint from which the run continues; 0 if there is none
    is_complete: bool  # nothing was left to be done


class EndTold(NamedTuple):
    """The end of a run."""

    status: str  # ``completed``, ``preempted``, or what failed, such as ``data``
    exit_code: int  # see ``ringtrain.errors``
    message: str | None = None  # why it ended, if it was not completed
    stopped_by: str | None = None  # of a preempted run ``signal``, ``file`` or ``time``


def tell_run(path: Path, *, step: int, is_complete: bool) -> None:
    """Say which run directory is open. Rank 0 calls it."""
    values = {"path": str(path.absolute()), "step": step, "is_complete": is_complete}
    _tell(RUN_FILE, values, replaces=True)


def tell_end(values: Mapping[str, Any]) -> None:
    """Say how the run ends, in the words of the ``end`` event; only the first word of any rank counts."""
    _tell(END_FILE, values, replaces=False)


def note_signal(directory: Path) -> None:
    """Record that ``launch local`` passes a signal on to the ranks, and has reported it."""
    (directory / SIGNAL_FILE).touch()


def is_signal_passed_on() -> bool:
    """True if ``launch local`` has passed a signal on to this rank."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    return named is not None and Path(named, SIGNAL_FILE).exists()


def find_supervisor() -> int | None:
    """The pid of ``launch local``, if that has started this rank."""
    pid = os.environ.get(SUPERVISOR_VARIABLE, "")
    return int(pid) if pid.isdigit() else None


def tell_left() -> None:
    """Say that this rank leaves in good order, which exit code 0 alone does not: the user's code may give it, too."""
    named = os.environ.get(LEFT_VARIABLE)
    if named:
        with contextlib.suppress(OSError):
            Path(named).touch()


def read_run(directory: Path) -> RunTold | None:
    """Read the message of ``tell_run``; None if there is none."""
    with contextlib.suppress(*NO_WORD):
        values = parse_json(read_bounded(directory / RUN_FILE, MAX_BYTES))
        return RunTold(path=Path(values["path"]), step=int(values["step"]), is_complete=bool(values["is_complete"]))
    return None


def read_end(directory: Path) -> EndTold | None:
    """Read the first message of ``tell_end``; None if there is none."""
    with contextlib.suppress(*NO_WORD):
        values = parse_json(read_bounded(directory / END_FILE, MAX_BYTES))
        status, exit_code = str(values["status"]), int(values["exit_code"])
        return EndTold(status, exit_code, values.get("message"), values.get("stopped_by"))
    return None


def clear(directory: Path) -> None:
    """Forget what a former start said."""
    for name in (RUN_FILE, END_FILE, SIGNAL_FILE):
        (directory / name).unlink(missing_ok=True)


def _tell(name: str, values: Mapping[str, Any], *, replaces: bool) -> None:
    named = os.environ.get(DIRECTORY_VARIABLE)
    if not named:
        return
    file = Path(named) / name
    temporary = file.with_name(f".{name}-{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):  # the listener has ended: no reason to fail
        with temporary.open("x", encoding="utf-8") as written:
            json.dump(dict(values), written)
        if replaces:
            temporary.replace(file)
            return
        try:
            os.link(temporary, file)  # fails where the file is there
        finally:
            temporary.unlink()
