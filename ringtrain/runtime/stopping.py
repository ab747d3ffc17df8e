"""Stop requests: signals, the file ``stop`` in the run directory, time limits, and the launcher's end.

A thread waits for signals by the wake-up pipe: Python's handlers do not run during C calls such as a training step. A
request is sent in the control vector, so that all ranks save at the same step. Before the first step, signals except
SIGUSR1 end the process at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from ringtrain.errors import Cause, PreemptedError, UsageError
from ringtrain.runtime.processes import Lineage
from ringtrain.runtime.time_limit import TimeLimit

EXIT_CODE = PreemptedError.exit_code
STOP_FILE = "stop"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
POLL_SECONDS = 1.0


class StopRequests:
    """Enter it in the main thread."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.cause: Cause | None = None
        self._is_training = self._was_interrupted = False
        self._file: Path | None = None
        self._limits: list[tuple[float, str]] = []  # monotonic clock, and reason
        self._lineage_at_start = Lineage()  # a launcher may exit before the ranks have joined
        self._lineage: Lineage | None = None
        self._is_joining = False
        self._signals = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        self._leave: Callable[[str, int], None] = lambda reason, exit_code: None
        self._announce: Callable[[str], None] = lambda reason: None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="stop requests", daemon=True)

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "training was started in a thread, and only Python's main thread hears signals: a request to stop "
                "would be lost. Train in the main thread, and put the rest into others."
            )
        # Blocked here and in later threads, to not interrupt system calls. NumPy's threads (OpenBLAS) still take
        # signals: hence handlers and the pipe.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._former_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._ignore) for number in self._signals}
        os.register_at_fork(after_in_child=self._forget)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        os.write(self._writer, b"\0")  # wake the thread
        self._thread.join()
        # Handlers ignore pending signals, before the default action can end the process.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._hand_back_signals(self._former_writer)
        os.close(self._reader)
        os.close(self._writer)

    @staticmethod
    def _ignore(number: int, frame: FrameType | None) -> None:
        """Handled by the thread, through the pipe."""

    def _forget(self) -> None:
        """In a forked child, such as a user's data reader, signals concern the child."""
        if not self._ended.is_set():
            self._hand_back_signals(-1)

    def _hand_back_signals(self, wakeup_descriptor: int) -> None:
        signal.set_wakeup_fd(wakeup_descriptor)
        for number, handler in self._handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    @property
    def is_pending(self) -> bool:
        return self.reason is not None

    def watch_file(self, run: Path) -> None:
        """Also watch the file ``stop``, on rank 0; a directory is ignored."""
        self._file = run / STOP_FILE

    def watch_time(self, limits: Iterable[TimeLimit]) -> None:
        """Also stop at the first limit, on rank 0."""
        now = time.monotonic()
        self._limits = sorted((now + limit.seconds_left, limit.reason) for limit in limits)

    def watch_launcher(self, *, is_joining: bool = False) -> None:
        """Also stop if an ancestor exits; at once while the ranks are joining, which may never end then."""
        self._lineage, self._is_joining = self._lineage_at_start, is_joining

    def at_early_end(self, leave: Callable[[str, int], None]) -> None:
        """Called before an immediate exit, with reason and exit code."""
        self._leave = leave

    def start_training(self, announce: Callable[[str], None]) -> None:
        """Save at requests from now on."""
        self._announce = announce
        for number in self._signals:  # user code may have replaced them
            signal.signal(number, self._ignore)
        self._is_training = True

    def end_training(self) -> None:
        """Requests have no effect and no message after an error."""
        self._announce = lambda reason: None

    def clear_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # the directory may be read-only
                self._file.unlink(missing_ok=True)

    def _wait(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        while True:
            ready, _, _ = select.select([self._reader], [], [], POLL_SECONDS)
            numbers = os.read(self._reader, 64) if ready else b""
            if self._ended.is_set():
                return
            for number in numbers:
                if number in self._signals:
                    self._take(signal.Signals(number))
            if self._file is not None and self.reason is None and os.path.isfile(self._file):
                self._note(f"the file {self._file}", "file")
            if self._limits and time.monotonic() >= self._limits[0][0]:
                self._note(self._limits[0][1], "time")
            if self._lineage is not None and self.reason is None and (pid := self._lineage.find_gone()) is not None:
                gone = f"the end of its launcher (pid {pid})"
                if self._is_joining:
                    self._end_now(f"{gone} before the ranks have joined", EXIT_CODE)
                self._note(gone, "signal")

    def _take(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._was_interrupted:
            self._end_now(f"a second {number.name}, without saving", 1)
        self._was_interrupted = self._was_interrupted or number == signal.SIGINT
        if not self._is_training and number != signal.SIGUSR1:
            self._end_now(f"{number.name} before the first step; there was nothing to save", EXIT_CODE)
        self._note(number.name, "signal")

    def _note(self, reason: str, cause: Cause) -> None:
        if self.reason is None:
            self.cause = cause
            self.reason = reason
            with contextlib.suppress(Exception):  # keep listening even if the message fails
                self._announce(reason)

    def _end_now(self, reason: str, exit_code: int) -> None:
        try:
            self._leave(reason, exit_code)
            sys.stdout.flush()
        finally:
            os._exit(exit_code)
