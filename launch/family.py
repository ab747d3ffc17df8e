"""Descendants of this process, also in other sessions: none outlives it.

Launchers open their own sessions and leave orphans, which prctl(2) lets this process adopt.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from typing import NoReturn

from ringtrain.runtime.processes import list_processes, read_process

from .lines import print_line

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_SECONDS = 0.02
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Send this process a signal when its parent dies, also after execve(2)."""
    _prctl(PR_SET_PDEATHSIG, number)


def run_guarded(work: Callable[[], int]) -> int:
    """Run ``work`` in a child process, and kill all descendants afterwards.

    If either process is killed, the other cleans up. ``FORWARDED`` signals are blocked until ``work`` has set its
    handlers. SIGQUIT kills all at once; the worker gets it when this process dies.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        code = 1
        try:
            os.setsid()  # a terminal's Ctrl-C arrives once, through the guard
            signal.signal(signal.SIGQUIT, lambda number, frame: _end_now())
            die_with_parent(signal.SIGQUIT)
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            if os.getppid() == guard:
                code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            end_descendants()
            os._exit(code)
    for number in (*FORWARDED, signal.SIGQUIT):
        if not is_ignored(number):
            signal.signal(number, lambda number, frame: send([worker], signal.Signals(number)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    _, status = os.waitpid(worker, 0)
    end_descendants()
    if os.WIFEXITED(status):
        return os.waitstatus_to_exitcode(status)
    print_line(
        f"launch itself (pid {worker}, which watched the ranks) was killed by {name_signal(os.WTERMSIG(status))}; "
        "the ranks were ended without saving, and the same command resumes from the newest checkpoint"
    )
    return 1


def is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end_now() -> NoReturn:
    end_descendants()
    os._exit(1)


def find_descendants() -> list[int]:
    """Exclude zombies."""
    processes = {pid: process for pid in list_processes() if (process := read_process(pid))}
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found, waiting = [], [os.getpid()]
    while waiting:
        waiting += (mine := children.get(waiting.pop(), []))
        found += mine
    return [pid for pid in found if not processes[pid].has_ended]


def end_descendants(*, timeout: float = 10.0) -> list[int]:
    """Kill all descendants, and their new children; return those in uninterruptible sleep."""
    end = time.monotonic() + timeout
    while (pids := find_descendants()) and time.monotonic() < end:
        send(pids, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
        reap()
    return pids


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def reap(*, but: int | None = None) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != but:
            os.waitpid(ended.si_pid, 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
