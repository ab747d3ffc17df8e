"""Running group of ranks."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringtrain.runtime.processes import LAUNCHERS
from ringtrain.runtime.run_record import note_signal

from .family import FORWARDED, die_with_parent, end_descendants, is_ignored, reap, send
from .lines import LabelledLines, print_line
from .rank import STATUS_FIFO, fifo_names

POLL_SECONDS = 0.2
# For the launcher to stop the other ranks after a failure, and to exit itself.
LAUNCHER_GRACE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    rank: int
    host: str
    pid: int
    exit_code: int | None
    signal: str | None
    has_quit: bool = False  # exited with 0 before the run's end
    memory_limit: str | None = None  # the exceeded limit, if the kernel killed it

    @property
    def failed(self) -> bool:
        return self.exit_code != 0 or self.has_quit


@dataclass(frozen=True, kw_only=True)
class GroupEnd:
    num_ranks: int  # requested
    num_started: int
    ends: Sequence[RankEnd]  # in order of exit
    last_errors: Sequence[Sequence[str]]  # stderr lines of each rank
    launcher: str
    launcher_code: int | None  # negative: signal; None: it had to be killed
    launcher_lines: Sequence[str]  # its own last output
    not_ended: Sequence[int]  # process ids in uninterruptible sleep

    @property
    def is_complete(self) -> bool:
        return len(self.ends) == self.num_ranks and self.first_failure is None

    @property
    def first_failure(self) -> RankEnd | None:
        return next((end for end in self.ends if end.failed), None)


class Requests:
    """Received signals. Create it in the main thread; it unblocks them."""

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []
        self.is_end_wanted = False
        for number in FORWARDED:
            if not is_ignored(number):
                signal.signal(number, self._take)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)

    def _take(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and signal.SIGINT in self.signals:
            self.is_end_wanted = True
            return
        # A closed terminal stops the run in good order.
        wanted = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        again = "; Ctrl-C again ends them at once" if number == signal.SIGINT else ""
        print_line(f"{signal.Signals(number).name}: the ranks save and leave{again}")
        self.signals.append(wanted)


class Group:
    def __init__(self, command: Sequence[str], listener: Path, num_ranks: int, requests: Requests) -> None:
        """``listener``: private directory of the named pipes."""
        self._num_ranks, self._requests, self._listener = num_ranks, requests, listener
        self._name = next((word for word in command if word in LAUNCHERS), os.path.basename(command[0]))
        self._pids: dict[int, int] = {}  # of living ranks
        self._hosts: dict[int, str] = {}
        self._ends: list[RankEnd] = []
        self._num_signals_sent = 0
        self._deadline: float | None = None
        self._selector = selectors.DefaultSelector()
        self._output = [LabelledLines(f"[{rank}] ", sys.stdout.fileno()) for rank in range(num_ranks)]
        self._errors = [LabelledLines(f"[{rank}] ", sys.stderr.fileno()) for rank in range(num_ranks)]
        self._launcher_lines = LabelledLines("", None)
        self._status = b""
        self._listen(_make_fifo(listener / STATUS_FIFO), self._hear)
        for rank, streams in enumerate(zip(self._output, self._errors, strict=True)):
            for name, lines in zip(fifo_names(rank), streams, strict=True):
                self._listen(_make_fifo(listener / name), lines.feed)
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self._listen(reader, self._launcher_lines.feed)
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        os.close(writer)

    def run(self) -> GroupEnd:
        """Wait until the group exits or the user stops it; no process remains."""
        try:
            while self._popen.poll() is None and not self._is_over():
                self._select(POLL_SECONDS)
                # Signal the ranks directly: a launcher would soon kill them.
                for number in self._requests.signals[self._num_signals_sent :]:
                    self._num_signals_sent += 1
                    note_signal(self._listener)
                    send(self._pids.values(), number)
                reap(but=self._popen.pid)
            code = self._popen.poll()
        finally:
            not_ended = end_descendants()
            self._popen.poll()
        while self._select(0):
            pass
        for lines in [*self._output, *self._errors, self._launcher_lines]:
            lines.end()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        return GroupEnd(
            num_ranks=self._num_ranks,
            num_started=len(self._hosts),
            ends=self._ends,
            last_errors=[list(lines.last) for lines in self._errors],
            launcher=self._name,
            launcher_code=code,
            launcher_lines=list(self._launcher_lines.last),
            not_ended=not_ended,
        )

    def _is_over(self) -> bool:
        if self._requests.is_end_wanted:
            return True
        if self._deadline is None and (
            len(self._ends) == self._num_ranks
            or any(end.failed for end in self._ends)
            or (self._requests.signals and not self._pids)
        ):
            self._deadline = time.monotonic() + (LAUNCHER_GRACE_SECONDS if self._ends else 0)
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _hear(self, data: bytes) -> None:
        *lines, self._status = (self._status + data).split(b"\n")
        for told in map(json.loads, lines):
            rank = told["rank"]
            if told.pop("event") == "ended":
                self._ends.append(RankEnd(host=self._hosts[rank], pid=self._pids.pop(rank), **told))
                continue
            self._pids[rank], self._hosts[rank] = told["pid"], told["host"]
            for number in self._requests.signals[: self._num_signals_sent]:
                send([told["pid"]], number)

    def _listen(self, descriptor: int, hear: Callable[[bytes], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, hear)

    def _select(self, timeout: float) -> bool:
        heard = False
        for key, _ in self._selector.select(timeout):
            try:
                data = os.read(key.fd, 2**16)
            except BlockingIOError:
                continue
            if data:
                key.data(data)
                heard = True
            else:
                self._selector.unregister(key.fd)
                os.close(key.fd)
        return heard


def _make_fifo(path: Path) -> int:
    """Open a named pipe for reading, and for writing: it then reports no end of file."""
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)
