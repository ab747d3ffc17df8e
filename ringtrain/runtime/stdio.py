"""Fault-tolerant stdout and stderr.

If a pipe's reader exits (``| head``), a terminal closes or a disk is full, prints would raise errors: switch to
``/dev/null``. If a reader pauses (``| less``, Ctrl-S), drop output: otherwise all ranks would wait.
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

_lost: set[str] = set()  # unwritable streams
_warn: Callable[[str], None] | None = None
_untold: list[str] = []  # warnings from before the run opened


class FaultTolerantStream(io.FileIO):
    """A descriptor that accepts all output, written or not."""

    def __init__(self, descriptor: int, name: str, *, closefd: bool = False) -> None:
        super().__init__(descriptor, "w", closefd=closefd)
        self.name = name
        self._left_out = 0  # dropped bytes while the reader is paused

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        try:
            while rest:
                if not self._is_ready():
                    self._left_out += len(rest)
                    break
                # More may block. None: a non-blocking pipe was full.
                rest = rest[super().write(rest[: select.PIPE_BUF]) or 0 :]
        except OSError as error:
            give_up(self.fileno(), str(self.name).strip("<>"), error)
        return memoryview(data).nbytes

    def _is_ready(self) -> bool:
        """Wait until a write would not block, once per pause."""
        stream = str(self.name).strip("<>")
        end = time.monotonic() + (0 if self._left_out else PATIENCE_SECONDS)
        while not _has_room(self.fileno(), seconds=TICK_SECONDS if time.monotonic() < end else 0):
            activity.move()  # other ranks may wait for this one
            if time.monotonic() >= end:
                if not self._left_out:
                    _tell(stream, f"{stream} is not read any more: what does not fit is left out until it is.")
                return False
        if self._left_out:
            super().write(f"\nringtrain: warning: {self._left_out:,} bytes of {stream} are left out here.\n".encode())
            self._left_out = 0
        return True


class _LastingText(io.TextIOWrapper):
    def close(self) -> None:
        self.flush()


def keep_streams() -> None:
    """Make stdout and stderr fault-tolerant, unless replaced."""
    for name, number in STREAMS.items():
        stream = getattr(sys, name)
        if stream is None:  # closed at the start: the next opened file must not get its descriptor
            _lead_to_nothing(number)
            stream = io.TextIOWrapper(io.BufferedWriter(io.FileIO(number, "w", closefd=False)))
        elif stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue
        buffer: Any = stream.buffer
        if isinstance(getattr(buffer, "raw", buffer), FaultTolerantStream):
            continue
        try:
            stream.flush()
        except OSError as error:
            give_up(number, name, error)
            stream.flush()
        lasting = FaultTolerantStream(number, f"<{name}>")
        kept = _LastingText(
            lasting if isinstance(buffer, io.RawIOBase) else io.BufferedWriter(lasting),  # unbuffered under python -u
            encoding=stream.encoding,
            errors=stream.errors,
            newline="\n",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, kept)
        setattr(sys, f"__{name}__", kept)


def give_up(descriptor: int, name: str, error: OSError) -> None:
    """Redirect a failed descriptor to ``/dev/null``, with a warning."""
    _lead_to_nothing(descriptor)
    if error.errno != errno.EPIPE:  # a reader that exits is normal
        _lost.add(name)
    _tell(name, f"{name} cannot be written any more ({error.strerror}): the program continues without it.")


def _tell(name: str, message: str) -> None:
    """Warn on the other stream and in the run's events."""
    other = STREAMS["stdout" if name == "stderr" else "stderr"]
    with contextlib.suppress(OSError):
        if _has_room(other, seconds=0):
            os.write(other, f"ringtrain: warning: {message}\n".encode())
    if _warn is None:
        _untold.append(message)
        return
    with contextlib.suppress(Exception):  # the run directory may be on the same full disk
        _warn(message)


def has_lost_stdout() -> bool:
    sys.stdout.flush()
    return "stdout" in _lost


def warn_by(warn: Callable[[str], None]) -> None:
    """Also report earlier losses."""
    global _warn
    _warn = warn
    while _untold:
        with contextlib.suppress(Exception):
            warn(_untold.pop(0))


def _has_room(descriptor: int, *, seconds: float) -> bool:
    """True if a write would not block, or would fail."""
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
