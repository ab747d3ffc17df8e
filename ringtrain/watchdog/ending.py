"""The last words of a process that hangs: each has its time, as whatever it needs may hang as well."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Callable

from ringtrain.runtime.world import World

STACKS_SECONDS = 3.0
# Any process may send it: the rank then writes the stacks of its threads, even where none of them can run.
STACKS_SIGNAL = signal.SIGRTMIN + 6


def start_bounded(action: Callable[[], None]) -> threading.Thread:
    """Do something in a thread of its own, for whose end nobody needs to wait."""

    def act() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=act, name="last words", daemon=True)
    thread.start()
    return thread


def run_bounded(action: Callable[[], None], seconds: float) -> None:
    """Do something, and wait no longer for it than this."""
    start_bounded(action).join(seconds)


def write_stacks(world: World) -> None:
    """Write to stderr where each thread of this process is."""
    who = f"ringtrain: rank {world.rank} on {world.node}"
    os.write(2, f"{who} is here:\n".encode())
    faulthandler.dump_traceback(file=2, all_threads=True)
    os.write(2, f"{who} ends.\n".encode())
