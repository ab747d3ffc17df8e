"""Limit on how long user code keeps a finished process alive.

At exit, Python waits without limit for non-daemon threads, ``multiprocessing`` children and ``atexit`` handlers. A
daemon thread gives them ``--exit_timeout`` seconds (in its own ticks), reports them, and ends the process with its exit
code. If no Python thread can run, a timer of the C library ends the process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import struct
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import NoReturn

from ringtrain.config import Config
from ringtrain.errors import RingtrainError
from ringtrain.messages.defects import format_defect, is_users_own
from ringtrain.messages.escaping import escape, escape_block
from ringtrain.runtime.orphans import describe_command, hand_over

FLUSH_SECONDS = 5.0
LONGEST_TICK_SECONDS = 1.0
CLOCK_MONOTONIC, SIGEV_THREAD = 1, 2  # from time.h and signal.h

_timeout, _name = Config.exit_timeout, "the process"
_exit_code = 0
_has_watch = threading.Lock()  # held after the first ``watch_end``
_timer: _Timer | None = None
_arming = threading.Lock()  # held while the timer is set
_waits_for_ranks = False
_closes: list[Callable[[], None]] = []  # before this process is ended


def allow(timeout: float, name: str) -> None:
    """``timeout``: seconds, 0: none; ``name``: of the process."""
    global _timeout, _name
    _timeout, _name = timeout, name


def note_exit_code(status: object) -> None:
    """``status``: argument of ``sys.exit``."""
    global _exit_code
    _exit_code = 0 if status is None else status & 0xFF if isinstance(status, int) else 1


@contextlib.contextmanager
def ending_forked() -> Iterator[None]:
    """Exit a process that user code has forked, and that returns here."""
    pid = os.getpid()
    try:
        yield
        require_same_process(pid)
    except BaseException as error:
        if os.getpid() == pid:
            raise
        note_exit_code(error.code if isinstance(error, SystemExit) else 1)
        with contextlib.suppress(OSError):
            if not isinstance(error, SystemExit):
                sys.stderr.write(escape_block(format_defect(error)))
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(_exit_code)


def require_same_process(pid: int) -> None:
    """Raise RingtrainError in a process forked from ``pid``, which shares its parent's connections and files."""
    if os.getpid() != pid:
        raise RingtrainError(
            f"process {os.getpid()}, which the workload's code forked from process {pid}, came back into ringtrain. A "
            "forked process has to end by itself, such as by os._exit(0)."
        )


def watch_end(*, has_left_ranks: bool) -> None:
    """Limit the time after the end of the program; unless it ``has_left_ranks``, not while it waits for ranks."""
    if not _timeout or not _has_watch.acquire(blocking=False):
        return
    plain_exit = sys.exit

    def exit_noted(status: object = None, /) -> NoReturn:
        note_exit_code(status)
        plain_exit(status)  # type: ignore[arg-type]

    global _timer
    sys.exit = exit_noted
    atexit.register(hand_over, _name, _timeout)
    timer = _Timer()
    _timer = timer
    if has_left_ranks:  # handlers registered earlier run later, and may block all threads
        atexit.register(_arm, timer)
    threading.Thread(target=_watch, args=(has_left_ranks, timer), name="end", daemon=True).start()


def close_before_exit(close: Callable[[], None]) -> None:
    """Let the watch call ``close`` before it ends a process that something keeps; the other ranks wait for that."""
    _closes.append(close)


@contextlib.contextmanager
def waiting_for_ranks() -> Iterator[None]:
    """Do not count the time of this context, which other ranks determine."""
    global _waits_for_ranks
    with _arming:
        _waits_for_ranks = True
        if _timer is not None:
            _timer.cancel()
    try:
        yield
    finally:
        _waits_for_ranks = False


def _arm(timer: _Timer) -> None:
    """Let the timer end this process, unless the ``_watch`` thread runs first."""
    with _arming:
        if not _waits_for_ranks:
            timer.exit_in(_timeout, earned_code())


def _watch(has_left_ranks: bool, timer: _Timer) -> None:
    tick = min(LONGEST_TICK_SECONDS, _timeout / 4)
    left = _timeout
    while left > 0:
        time.sleep(tick)
        is_counted = _is_ending() and not _waits_for_ranks
        left = left - tick if is_counted else _timeout
        if has_left_ranks and left < _timeout:
            _arm(timer)
    waits = not has_left_ranks and any(_is_in(frame, "shutdown", "horovod") for frame in _frames(_main_frame()))
    children = multiprocessing.active_children()
    how = "It keeps waiting" if waits else f"It leaves with exit code {earned_code()}"
    message = (
        f"{_name} (pid {os.getpid()}) is still there {_timeout:g} s after its program has ended, kept by "
        f"{describe_keepers(children)}. {how}. Your code should end what it starts, or make it a daemon; if that may "
        "take so long, raise --exit_timeout."
    )
    with contextlib.suppress(OSError):
        os.write(2, f"ringtrain: warning: {escape(message)}\n".encode())
    if waits:
        return
    for process in children:  # they would hold the launcher's pipes
        process.kill()
    hand_over(_name, _timeout)
    for close in _closes:
        closing = threading.Thread(target=close, name="close", daemon=True)
        closing.start()
        closing.join(_timeout)
    timer.exit_in(FLUSH_SECONDS, earned_code())
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(earned_code())


def _is_ending() -> bool:
    """True if the main thread has finished and no other thread trains."""
    is_left = getattr(threading, "_SHUTTING_DOWN", False) or not threading.main_thread().is_alive()
    return is_left and not any(
        _is_in(frame, "fit", "keras") for top in sys._current_frames().values() for frame in _frames(top)
    )


def earned_code() -> int:
    """Return the exit code of this program, as far as it is known."""
    return 1 if hasattr(sys, "last_value") else _exit_code  # set by Python for an uncaught exception


def describe_keepers(children: Sequence[BaseProcess]) -> str:
    frames = sys._current_frames()
    keepers = [
        f"the thread {thread.name!r}{_describe_place(frames.get(thread.ident or 0))}"
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]
    keepers += [f"the child process {child.pid} ({child.name}: {describe_command(child.pid)})" for child in children]
    main = _main_frame()
    if not keepers or any(is_users_own(frame.f_code.co_filename) for frame in _frames(main)):
        keepers.append(f"what runs at exit{_describe_place(main)}")
    return ", ".join(keepers)


def _describe_place(innermost: FrameType | None) -> str:
    """Prefer user code, then packages."""
    frames = list(_frames(innermost))
    files = [frame.f_code.co_filename for frame in frames]
    own = [number for number, file in enumerate(files) if is_users_own(file)]
    packages = [number for number, file in enumerate(files) if not file.startswith(sysconfig.get_path("stdlib"))]
    for number in (own or packages or range(len(frames)))[:1]:
        return f" (in {frames[number].f_code.co_name}, {files[number]}:{frames[number].f_lineno})"
    return ""


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _frames(innermost: FrameType | None) -> Iterator[FrameType]:
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back


def _is_in(frame: FrameType, function: str, package: str) -> bool:
    return frame.f_code.co_name == function and f"{os.sep}{package}{os.sep}" in frame.f_code.co_filename


class _Timer:
    """Calls C's ``_exit`` in its own thread, without Python (timer_create(2))."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._id: ctypes.c_void_p | None = None

    def cancel(self) -> None:
        """Remove the time limit."""
        if self._id is not None:
            self._set(0.0)

    def exit_in(self, seconds: float, exit_code: int) -> None:
        """Set or replace the time limit."""
        with contextlib.suppress(AttributeError):  # other C libraries
            if self._id is None:
                self._id = ctypes.c_void_p()
                end = ctypes.cast(self._libc._exit, ctypes.c_void_p).value
                event = struct.pack("qiiPP32x", exit_code, 0, SIGEV_THREAD, end, 0)  # struct sigevent, signal.h
                self._libc.timer_create(CLOCK_MONOTONIC, event, ctypes.byref(self._id))
            self._set(seconds)

    def _set(self, seconds: float) -> None:
        spec = (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9))  # struct itimerspec
        self._libc.timer_settime(self._id, 0, spec, None)
