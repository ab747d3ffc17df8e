"""A rank that is slow at computing: all others wait for it in every step, and nobody sees why.

What a step costs a rank, without its waiting for the others, is not to be seen from how long the step takes: that is
the same on all ranks. But Linux counts for each thread how long it ran, and how long it wanted to run while the core
was taken (Documentation/scheduler/sched-stats.rst: /proc/PID/schedstat): a rank whose core is slow, throttled or shared
with another program has more of the two, and one that waits has neither. What a GPU computes is not in it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ringtrain.guard.ranks import name_ranks

LONGEST_WINDOW_SECONDS = 30.0
WINDOWS = 2  # in a row: a burst of something else is none
FACTOR = 2.0
# Of a core: a rank that computes less is not what a step takes its time for.
LEAST_SHARE = 0.5
TASKS = Path("/proc/self/task")


def list_threads() -> set[str]:
    """The threads of this process."""
    try:
        return set(os.listdir(TASKS))
    except OSError:
        return set()


class BusyClock:
    """How long this process has been busy: its threads ran, or wanted to."""

    def __init__(self) -> None:
        self._left_out: set[str] = set()
        self._former: dict[str, float] = {}
        self._seconds = 0.0

    def leave_out(self, threads: Iterable[str]) -> None:
        """Do not count these: MPI's and Horovod's, which are busy with waiting."""
        self._left_out |= set(threads)

    def read(self) -> float:
        """Seconds, over all threads that have lived since the last call."""
        now = {}
        for thread in list_threads() - self._left_out:
            try:
                ran, waited, _ = (TASKS / thread / "schedstat").read_text().split()
            except (OSError, ValueError):  # it has ended, or the kernel counts nothing
                continue
            now[thread] = (int(ran) + int(waited)) / 1e9
            self._seconds += max(0.0, now[thread] - self._former.get(thread, 0.0))
        self._former = now
        return self._seconds


class Stragglers:
    """Finds, on rank 0, a rank that is busy for much longer than the others, for a while."""

    def __init__(self, window: float) -> None:
        """``window`` is the time, in seconds, over which ranks are compared."""
        self._window = window
        self._begun: dict[int, float] = {}
        self._elapsed = 0.0
        self._times_found: dict[int, int] = {}

    def look(self, busy: Mapping[int, float], seconds: float) -> dict[int, tuple[float, float]]:
        """Those that are slow now and were not told before, with their busy share of the time and the others'.

        Args:
            busy: for each rank, seconds for which it has been busy so far.
            seconds: that have passed since the last call.
        """
        if not self._begun or set(busy) != set(self._begun):
            self._begun, self._elapsed = dict(busy), 0.0
            return {}
        self._elapsed += seconds
        if self._elapsed < self._window:
            return {}
        shares = {rank: (busy[rank] - self._begun[rank]) / self._elapsed for rank in busy}
        self._begun, self._elapsed = dict(busy), 0.0
        slow = find_slow(shares)
        self._times_found = {
            rank: times + (rank in slow)
            for rank, times in ((rank, self._times_found.get(rank, 0)) for rank in shares)
            if rank in slow or times >= WINDOWS
        }
        return {rank: slow[rank] for rank in slow if self._times_found[rank] == WINDOWS}


def find_slow(shares: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """The ranks that are busy for FACTOR times as long as the others, with their share of the time and the others'."""
    slow = {}
    for rank, share in shares.items():
        others = [other for number, other in shares.items() if number != rank]
        usual = statistics.median(others) if others else share
        if share >= LEAST_SHARE and share >= FACTOR * usual:
            slow[rank] = (share, usual)
    return slow


def describe_slow(rank: int, share: float, usual: float, nodes: Sequence[str]) -> str:
    """What to tell the user."""
    return (
        f"{name_ranks([rank], nodes)} slows the others down: it has a core busy, or waits for one, for {share:.0%} of "
        f"the time, the others for {usual:.0%}. Its cores are slower than theirs or shared with another program, or it "
        "has more to do."
    )
