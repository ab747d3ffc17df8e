"""Python stacks of this process: written when it hangs, and searched for the line of the user's code."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

from ringtrain.messages.defects import is_users_own
from ringtrain.runtime.world import World

# Threads of our own that are still when all is well.
OUR_THREADS = frozenset({"watchdog", "last words", "stop requests", "lease", "failing", "end"})
MAX_FRAME_LENGTH = 300  # characters


def write_stacks(world: World) -> None:
    """Write the stacks of this process' threads to stderr, except those of our own threads.

    Source lines are left out: reading them may hang as well.
    """
    who = f"ringtrain: rank {world.rank} on {world.node}"
    lines = [f"{who} is here:"]
    for name, frame in _threads():
        lines.append(f"Thread {name} (most recent call first):")
        lines += [
            f'  File "{part.f_code.co_filename}", line {number} in {part.f_code.co_name}'
            for part, number in traceback.walk_stack(frame)
        ]
    data = "\n".join([*lines, f"{who} ends.", ""])
    os.write(2, data.encode(errors="backslashreplace"))


def find_user_frame() -> str:
    """Return the line of user code that runs now, as ``FILE:LINE (FUNCTION)``; empty if no such line runs.

    Code that a library has called, such as a generator of the input pipeline or a callback, comes before the line of
    the script that calls ``fit``.
    """
    found = ""
    for _, frame in _threads():
        own, is_called_back = None, False
        for part, number in traceback.walk_stack(frame):
            if not is_users_own(part.f_code.co_filename):
                is_called_back |= own is not None and "/site-packages/" in part.f_code.co_filename
            elif own is None:
                own = part.f_code, number
        if own is not None and (is_called_back or not found):
            code, number = own
            found = f"{_shorten(code.co_filename)}:{number} ({code.co_name})"[:MAX_FRAME_LENGTH]
            if is_called_back:
                break
    return found


def _threads() -> Iterator[tuple[str, FrameType]]:
    """The names of all threads except our own, with their innermost frames; the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if names.get(ident) not in OUR_THREADS}
    main = threading.main_thread().ident
    for ident in sorted(frames, key=lambda ident: ident != main):
        yield names.get(ident, f"{ident:#x}"), frames[ident]


def _shorten(file: str) -> str:
    """Return a path relative to the working directory if it is below that."""
    return file.removeprefix(os.getcwd() + os.sep)
