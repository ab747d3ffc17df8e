"""stdout and stderr that go away: the program continues without them.

A pipe whose reader has ended (``| head``), a terminal that was closed, a full disk behind ``> log``: there every print
raises an error, in the user's own code as well, and so does the interpreter's last flush. The streams that are made
here write to ``/dev/null`` from the first failure on. What a reader that stands still (``| less``, Ctrl-S) leaves no
room for is left out: the run would wait for it, and with it all ranks.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
import time
from collections.abc import Callable
from typing import Any

from ringtrain.runtime import activity

STREAMS = {"stdout": 1, "stderr": 2}
PATIENCE_SECONDS = 30.0
TICK_SECONDS = 1.0

_lost: set[str] = set()  # those that can no longer be written
_warn: Callable[[str], None] | None = None
_untold: list[str] = []  # what went wrong before there was a run to tell


class LastingFile(io.FileIO):
    """A descriptor that accepts all output, shown or not."""

    def __init__(self, descriptor: int, name: str, *, closefd: bool = False) -> None:
        """``name`` is the stream's, in words."""
        super().__init__(descriptor, "w", closefd=closefd)
        self.name = name
        self._left_out = 0  # bytes, while its reader stands still

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        try:
            while rest:
                if not self._is_ready():
                    self._left_out += len(rest)
                    break
                # For more than this there may be no room. None: a pipe that does not wait had too little.
                rest = rest[super().write(rest[: select.PIPE_BUF]) or 0 :]
        except OSError as error:
            give_up(self.fileno(), str(self.name).strip("<>"), error)
        return memoryview(data).nbytes

    def _is_ready(self) -> bool:
        """True if something can be written without having to wait; it is waited for, but not again and again."""
        stream = str(self.name).strip("<>")
        end = time.monotonic() + (0 if self._left_out else PATIENCE_SECONDS)
        while not _has_room(self.fileno(), seconds=TICK_SECONDS if time.monotonic() < end else 0):
            activity.move()  # others may wait for this one meanwhile
            if time.monotonic() >= end:
                if not self._left_out:
                    _tell(stream, f"{stream} is not read any more: what does not fit is left out until it is.")
                return False
        if self._left_out:
            super().write(f"\nringtrain: warning: {self._left_out:,} bytes of {stream} are left out here.\n".encode())
            self._left_out = 0
        return True


class _LastingText(io.TextIOWrapper):
    """A stream that code of the user, which closes it, does not take away from the rest of the program."""

    def close(self) -> None:
        self.flush()


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
        kept = _LastingText(
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
    if error.errno != errno.EPIPE:  # a reader that left had what it wanted
        _lost.add(name)
    _tell(name, f"{name} cannot be written any more ({error.strerror}): the program continues without it.")


def _tell(name: str, message: str) -> None:
    """Say what is wrong with a stream where somebody may read it: on the other one, and in the run's events."""
    other = STREAMS["stdout" if name == "stderr" else "stderr"]
    with contextlib.suppress(OSError):
        if _has_room(other, seconds=0):
            os.write(other, f"ringtrain: warning: {message}\n".encode())
    if _warn is None:
        _untold.append(message)
        return
    with contextlib.suppress(Exception):  # the run directory may be on the same full disk, or closed
        _warn(message)


def has_lost_stdout() -> bool:
    """True if something that was printed could not be written, such as to a full disk."""
    sys.stdout.flush()
    return "stdout" in _lost


def warn_by(warn: Callable[[str], None]) -> None:
    """Have this told of each stream that goes away, too, those included that already have."""
    global _warn
    _warn = warn
    while _untold:
        with contextlib.suppress(Exception):
            warn(_untold.pop(0))


def _has_room(descriptor: int, *, seconds: float) -> bool:
    """True if a descriptor takes something within so long; also if that can only fail."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(1000 * seconds))


def _lead_to_nothing(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        if null == descriptor:
            os.set_inheritable(null, True)
            return
        os.dup2(null, descriptor, inheritable=descriptor in STREAMS.values())
        os.close(null)
