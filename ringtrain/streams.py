"""stdout and stderr that go away: the program goes on without them.

A pipe whose reader has ended (``| head``), a terminal that was closed, a full disk behind ``> log``: there every print
raises an error, in the user's own code as well, and so does the interpreter's last flush. The streams that are made
here write to ``/dev/null`` from the first failure on.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any

STREAMS = {"stdout": 1, "stderr": 2}

_warn: Callable[[str], None] | None = None


class LastingFile(io.FileIO):
    """A descriptor that takes whatever is written to it, shown or not."""

    def __init__(self, descriptor: int, name: str, *, closefd: bool = False) -> None:
        """``name`` is the stream's, in words."""
        super().__init__(descriptor, "w", closefd=closefd)
        self.name = name

    def write(self, data: Any) -> int | None:  # type: ignore[override]  # None: a pipe that is full for now
        try:
            return super().write(data)
        except OSError as error:
            give_up(self.fileno(), str(self.name).strip("<>"), error)
            return memoryview(data).nbytes


def keep_streams() -> None:
    """Let no failure of stdout or stderr end this program, from now on; where they still are Python's own."""
    for name, number in STREAMS.items():
        stream = getattr(sys, name)
        if stream is None:  # closed when the program began: the next file that is opened must not be taken for it
            _lead_to_nothing(number)
            stream = io.TextIOWrapper(io.BufferedWriter(io.FileIO(number, "w", closefd=False)))
        elif stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue
        buffer: Any = stream.buffer
        if isinstance(getattr(buffer, "raw", buffer), LastingFile):
            continue
        try:
            stream.flush()
        except OSError as error:
            give_up(number, name, error)
            stream.flush()
        lasting = LastingFile(number, f"<{name}>")
        kept = io.TextIOWrapper(
            lasting if isinstance(buffer, io.RawIOBase) else io.BufferedWriter(lasting),  # python -u has no buffer
            encoding=stream.encoding,
            errors=stream.errors,
            newline="\n",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, kept)
        setattr(sys, f"__{name}__", kept)


def give_up(descriptor: int, name: str, error: OSError) -> None:
    """Lead a descriptor that takes nothing any more to ``/dev/null``, and say so where somebody may still read it."""
    _lead_to_nothing(descriptor)
    message = f"{name} cannot be written any more ({error.strerror}): the program goes on without it."
    other = STREAMS["stdout" if name == "stderr" else "stderr"]
    with contextlib.suppress(OSError):
        os.write(other, f"ringtrain: warning: {message}\n".encode())
    if _warn is not None:
        with contextlib.suppress(Exception):  # the run directory may be on the same full disk, or closed
            _warn(message)


def warn_by(warn: Callable[[str], None]) -> None:
    """Have this told of each stream that goes away, too."""
    global _warn
    _warn = warn


def _lead_to_nothing(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        if null == descriptor:
            os.set_inheritable(null, True)
            return
        os.dup2(null, descriptor, inheritable=descriptor in STREAMS.values())
        os.close(null)
