"""The descendants of this process, also those in other sessions: none outlives it.

Launchers open sessions of their own and leave orphans, so that neither a process group nor a session holds all that
they start. On Linux a process can ask to be killed when its parent dies, and a parent to adopt the orphans among its
descendants (prctl(2): PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER).
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
    """Send this process a signal when its parent dies. It outlives execve(2)."""
    _prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def run_guarded(work: Callable[[], int]) -> int:
    """Do ``work`` in a child process, and end all descendants afterwards.

    Whichever of the two is killed, the other one cleans up. Signals of ``FORWARDED`` are passed on; they are blocked
    when ``work`` begins, which unblocks them once it has its handlers. SIGQUIT ends all at once; the worker gets it
    when this process dies.
    """
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        code = 1
        try:
            os.setsid()  # a terminal's Ctrl-C comes once, through the guard
            signal.signal(signal.SIGQUIT, lambda number, frame: _end_now())
            die_with_parent(signal.SIGQUIT)
            adopt_orphans()
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
    """True if the user's shell wants a signal ignored: ``nohup`` does so with SIGHUP."""
    return signal.getsignal(number) is signal.SIG_IGN


def name_signal(number: int) -> str:
    """A signal in words; those of the real-time range have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end_now() -> NoReturn:
    end_descendants()
    os._exit(1)


def find_descendants() -> list[int]:
    """The living processes that come of this one; those that have ended and wait for their parent are none."""
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
    """Kill all that come of this process; returns those that could not be ended (in uninterruptible sleep).

    While the tree is read a process may start another, so it is read again until it is empty.
    """
    end = time.monotonic() + timeout
    while (pids := find_descendants()) and time.monotonic() < end:
        send(pids, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
        reap()
    return pids


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to those that still live, and may be signalled: a setuid program may not."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def reap(*, but: int | None = None) -> None:
    """Collect adopted children that have ended, ``but`` one that somebody else waits for."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != but:
            os.waitpid(ended.si_pid, 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
