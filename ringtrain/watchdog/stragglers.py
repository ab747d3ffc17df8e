"""Detection of a slow rank, for which the others wait.

On cores each rank measures its steps without its waits for other ranks. Where these are not measured (deterministic
mode, ``fit``, GPUs, ranks that wait for each other within a model), it samples if one of its threads is runnable
(proc(5): state R): always on a slow rank, not on waiting ones (except in waits too short to sleep). GPU work is not
detected.
"""

from __future__ import annotations

import operator
import statistics
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ringtrain.messages.ranks import name_ranks
from ringtrain.runtime.processes import list_threads, read_process

LOOKS_PER_WINDOW = 30
WINDOWS = 2  # consecutive, to ignore bursts


class Measure(NamedTuple):
    words: str
    factor: float  # of a slow rank's share over the others' median
    excess: float = 0.0  # of its share
    least: float = 0.0  # share of a slow rank


STEPS = Measure("without waits for others its steps take {:.0%} of the time, theirs {:.0%}", factor=1.2, excess=0.05)
LOOKS = Measure("it is at work {:.0%} of the time, they are {:.0%}", factor=2.0, least=0.9)


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


class RankTotals(NamedTuple):
    """Totals of a rank since its start."""

    looks: float
    runnable: float  # looks at which a thread was
    steps_sec: float = 0  # 0: not timed
    own_sec: float = 0  # of this, without waits for other ranks


class Stragglers:
    def __init__(self) -> None:
        self._begun: dict[int, RankTotals] = {}
        self._windows_slow: dict[int, int] = {}

    def compare(self, totals: Mapping[int, RankTotals]) -> dict[int, str]:
        """Return new slow ranks and why. ``totals``: per rank; empty if not training."""
        if set(totals) != set(self._begun):
            self._begun = dict(totals)
            return {}
        since = {rank: RankTotals(*map(operator.sub, totals[rank], begun)) for rank, begun in self._begun.items()}
        if min((each.looks for each in since.values()), default=0) < LOOKS_PER_WINDOW:
            return {}
        self._begun = dict(totals)
        slow = find_slow(since)
        told = {rank for rank, windows in self._windows_slow.items() if windows >= WINDOWS}
        self._windows_slow = {rank: self._windows_slow.get(rank, 0) + 1 for rank in {*slow, *told}}
        return {rank: why for rank, why in slow.items() if self._windows_slow[rank] == WINDOWS}


def find_slow(since: Mapping[int, RankTotals]) -> dict[int, str]:
    """Return slow ranks and why."""
    if all(each.steps_sec > 0 for each in since.values()):
        measure, shares = STEPS, {rank: each.own_sec / each.steps_sec for rank, each in since.items()}
    else:
        measure, shares = LOOKS, {rank: each.runnable / each.looks for rank, each in since.items()}
    slow = {}
    for rank, share in shares.items():
        others = [other for number, other in shares.items() if number != rank]
        usual = statistics.median(others) if others else share
        if others and share >= max(measure.least, measure.factor * usual, usual + measure.excess):
            slow[rank] = measure.words.format(share, usual)
    return slow


def describe_slow(rank: int, why: str, nodes: Sequence[str]) -> str:
    return (
        f"{name_ranks([rank], nodes)} is slow, and the others wait for it: {why}. Its cores are slower than theirs or "
        "taken by another program, its data come slowly, or it has more to do."
    )
