"""A rank that is slow at computing: all others wait for it in every step, and nobody sees why.

What a step costs a rank, without its waiting for the others, is not to be seen from how long the step takes: that is
the same on all ranks. But now and then each rank looks whether one of its threads can run (proc(5): state R, on a core
or waiting for one). One that is slow, because its cores are slow, throttled or taken by another program, is always seen
so; those that wait for it are not. If the wait is too short for a thread to fall asleep, and of what a GPU computes,
nothing is seen.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterable, Mapping, Sequence

from ringtrain.messages.ranks import name_ranks
from ringtrain.runtime.processes import list_threads, read_process

LOOKS_PER_WINDOW = 30
WINDOWS = 2  # in a row: a burst of something else is none
FACTOR = 2.0
LEAST_SHARE = 0.9  # who sleeps for more is not what all wait for


class Looks:
    """The share of samples in which this process could run."""

    def __init__(self) -> None:
        self.times = self.times_runnable = 0
        self._left_out: set[int] = set()

    def leave_out(self, threads: Iterable[int]) -> None:
        """Do not count these: MPI's and Horovod's, which are busy with waiting."""
        self._left_out |= set(threads)

    def look(self) -> None:
        """Look once, from a thread that does not count itself."""
        self.times += 1
        others = list_threads() - self._left_out - {threading.get_native_id()}
        threads = (read_process(f"self/task/{thread}") for thread in others)
        self.times_runnable += any(thread is not None and thread.state == "R" for thread in threads)


class Stragglers:
    """Finds, on rank 0, a rank that is always at work while the others wait."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[int, int]] = {}
        self._windows_slow: dict[int, int] = {}

    def compare(self, looks: Mapping[int, tuple[int, int]]) -> dict[int, tuple[float, float]]:
        """Slow ranks that were not reported before, with the shares of samples in which they and the others could run.

        ``looks``: how often each rank was looked at, and how often it could run then; empty if they do not train.
        """
        if set(looks) != set(self._begun):
            self._begun = dict(looks)
            return {}
        since = {
            rank: (looks[rank][0] - times, looks[rank][1] - runnable) for rank, (times, runnable) in self._begun.items()
        }
        if min((times for times, _ in since.values()), default=0) < LOOKS_PER_WINDOW:
            return {}
        self._begun = dict(looks)
        slow = find_slow({rank: runnable / times for rank, (times, runnable) in since.items()})
        told = {rank for rank, windows in self._windows_slow.items() if windows >= WINDOWS}
        self._windows_slow = {rank: self._windows_slow.get(rank, 0) + 1 for rank in {*slow, *told}}
        return {rank: shares for rank, shares in slow.items() if self._windows_slow[rank] == WINDOWS}


def find_slow(shares: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """The ranks that nearly always could run while the others mostly could not, with their share and the others'."""
    slow = {}
    for rank, share in shares.items():
        others = [other for number, other in shares.items() if number != rank]
        if others and share >= LEAST_SHARE and share >= FACTOR * statistics.median(others):
            slow[rank] = (share, statistics.median(others))
    return slow


def describe_slow(rank: int, share: float, usual: float, nodes: Sequence[str]) -> str:
    """The warning about a slow rank."""
    return (
        f"{name_ranks([rank], nodes)} is slow, and the others wait for it: it is at work {share:.0%} of the time, they "
        f"are {usual:.0%}. Its cores are slower than theirs or taken by another program, or it has more to do."
    )
