"""Detection of a rank that computes slowly.

Step times are equal on all ranks. So each rank samples if one of its threads is runnable (proc(5): state R): always on
a slow rank, not on waiting ones. Not detected: waits too short to sleep, and GPU work.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterable, Mapping, Sequence

from ringtrain.messages.ranks import name_ranks
from ringtrain.runtime.processes import list_threads, read_process

LOOKS_PER_WINDOW = 30
WINDOWS = 2  # consecutive, to ignore bursts
FACTOR = 2.0
LEAST_SHARE = 0.9  # a slow rank seldom sleeps


class Looks:
    def __init__(self) -> None:
        self.times = self.times_runnable = 0
        self._left_out: set[int] = set()

    def leave_out(self, threads: Iterable[int]) -> None:
        """Ignore threads of MPI and Horovod, which wait actively."""
        self._left_out |= set(threads)

    def look(self) -> None:
        """Sample once, without the calling thread."""
        try:
            others = list_threads() - self._left_out - {threading.get_native_id()}
        except OSError:  # no file descriptor is left
            return
        self.times += 1
        threads = (read_process(f"self/task/{thread}") for thread in others)
        self.times_runnable += any(thread is not None and thread.state == "R" for thread in threads)


class Stragglers:
    def __init__(self) -> None:
        self._begun: dict[int, tuple[int, int]] = {}
        self._windows_slow: dict[int, int] = {}

    def compare(self, looks: Mapping[int, tuple[int, int]]) -> dict[int, tuple[float, float]]:
        """Return new slow ranks, with runnable shares of the rank and the others.

        ``looks``: per rank, samples and runnable ones; empty if not training.
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
    slow = {}
    for rank, share in shares.items():
        others = [other for number, other in shares.items() if number != rank]
        if others and share >= LEAST_SHARE and share >= FACTOR * statistics.median(others):
            slow[rank] = (share, statistics.median(others))
    return slow


def describe_slow(rank: int, share: float, usual: float, nodes: Sequence[str]) -> str:
    return (
        f"{name_ranks([rank], nodes)} is slow, and the others wait for it: it is at work {share:.0%} of the time, they "
        f"are {usual:.0%}. Its cores are slower than theirs or taken by another program, or it has more to do."
    )
