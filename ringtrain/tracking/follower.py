"""A process beside rank 0 that sends to a tracker what the run logs, while it trains.

A process, since a tracker's package takes seconds to import and may hold Python's lock, hang or crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringtrain.errors import RingtrainError
from ringtrain.files.bounded import open_descriptor
from ringtrain.messages.escaping import escape
from ringtrain.runtime import activity
from ringtrain.runtime.processes import MEANT_FOR_RANK, PACKAGES
from ringtrain.tracking.base import DEFAULTS, describe_failure
from ringtrain.tracking.feed import Feed

if TYPE_CHECKING:
    from ringtrain.tracking.copying import Copy

PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, POLL_SECONDS = 2.0, 60.0, 0.05
LAST_SECONDS, LAST_COPY_SECONDS = 10.0, 50.0  # for the last events and files, when the run has ended
GROUP_TRIES = 10
NICE, COPY_NICE = 19, 10  # about 1 % and 10 % of a core that training wants
SEND_SECONDS = 120  # of a tracker's call, or a chunk of a file


class SenderBusyError(RingtrainError):
    pass


@contextlib.contextmanager
def following(path: Path, trackers: Sequence[str], warn: Callable[[str], None]) -> Iterator[None]:
    """Follow a run of this process until it has logged its end."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    for name in trackers:
        try:
            processes[name] = start(path, name)
        except OSError as error:
            warn(f"{name} gets nothing: its process cannot be started: {error.strerror}")
    try:
        yield
    finally:
        now = time.monotonic()
        for process in processes.values():
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write(b"\n")  # its end alone may not come: forked processes keep the pipe open
                process.stdin.close()
        for name, process in processes.items():
            if finish(process, now + last_seconds(name)) != 0:
                again = f"python -m ringtrain track {shlex.quote(str(path))} --to {name}"
                warn(f"{name} did not take all. The next start sends the rest, or: {again}")


def start(path: Path, name: str) -> subprocess.Popen[bytes]:
    code = f"import sys; sys.path.append({PACKAGES!r}); from {__name__} import main; main(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path), repr(time.time()), name],
        env=DEFAULTS | os.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[bytes], end: float) -> int | None:
    """Return the exit code; None: it does not end, even by SIGKILL."""
    while process.poll() is None and time.monotonic() < end:
        activity.move()  # or the watchdog would take the wait for a hang
        time.sleep(POLL_SECONDS)
    if process.returncode is not None:
        return process.returncode
    end_session(process.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(1.0)
    return None


def last_seconds(name: str) -> float:
    return LAST_COPY_SECONDS if "://" in name else LAST_SECONDS


def end_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def main(path: str, begun: str, name: str) -> None:
    """Exit with 1 if something was not sent. What packages print is dropped: it may hold secrets."""
    for number in MEANT_FOR_RANK:
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    set_group_nice(COPY_NICE if "://" in name else NICE)
    messages = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    is_over = threading.Event()
    threading.Thread(target=wait_for_end, args=(os.getppid(), is_over, last_seconds(name)), daemon=True).start()
    opened = contextlib.ExitStack()  # until this process ends
    move = functools.partial(signal.alarm, SEND_SECONDS)
    feed: Feed | Copy | None = None
    pause, has_warned = PAUSE_SECONDS, False
    while True:
        is_last = is_over.is_set()
        signal.alarm(SEND_SECONDS)  # ends this process, even while a call holds Python's lock
        try:
            feed = feed or opened.enter_context(open_sender(Path(path), name, begun=float(begun), move=move))
            feed.send(ends=is_last)
            pause, has_warned, is_sent = PAUSE_SECONDS, False, True
        except Exception as error:
            # The process of the former start may live for LAST_SECONDS.
            waits = isinstance(error, SenderBusyError) and time.time() < float(begun) + 2 * LAST_SECONDS
            if not has_warned and not waits:
                text = escape(f"{name} takes nothing: {describe_failure(error).rstrip('.')}. Training goes on.")
                os.write(messages, f"ringtrain: warning: {text}\n".encode())
            pause, has_warned, is_sent = pause if waits else min(2 * pause, LONGEST_PAUSE_SECONDS), not waits, False
        signal.alarm(0)
        if is_last:
            sys.exit(not is_sent)
        is_over.wait(pause)


def set_group_nice(value: int) -> None:
    """Set this session's nice value: Linux ignores a process' own when it shares cores between sessions.

    Linux accepts one such change in 0.1 s from all users (proc_sched_autogroup_set_nice in kernel/sched/autogroup.c).
    """
    with contextlib.suppress(OSError):  # kernels without it
        for _ in range(GROUP_TRIES):
            with contextlib.suppress(BlockingIOError):
                Path("/proc/self/autogroup").write_text(str(value))
                return
            time.sleep(0.1)


@contextlib.contextmanager
def open_sender(
    path: Path, name: str, *, begun: float = 0.0, move: Callable[[], object] = lambda: None
) -> Iterator[Feed | Copy]:
    """``name``: a tracker, or the address of a store. Raise SenderBusyError while another process sends to it."""
    to = "copy" if "://" in name else name
    with open(open_descriptor(path / f".tracker-{to}.lock", os.O_RDWR | os.O_CREAT), "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = f"another process is sending {str(path)!r} to {to}: the run itself, or ringtrain track."
            raise SenderBusyError(f"{who} Wait until it has ended.") from None
        except OSError:  # a file system without locks
            pass
        if "://" in name:
            from ringtrain.tracking.copying import Copy

            yield Copy(path, name, move=move)
        else:
            yield Feed(path, name, begun=begun)


def wait_for_end(parent: int, is_over: threading.Event, seconds: float) -> None:
    """Set ``is_over`` when the run has written its last file, or its process has been killed.

    Launchers wait for this process, so it ends soon after.
    """
    while os.getppid() == parent and not select.select([0], [], [], 0.5)[0]:
        pass
    is_over.set()
    set_group_nice(0)
    time.sleep(seconds)
    end_session(os.getpid())
