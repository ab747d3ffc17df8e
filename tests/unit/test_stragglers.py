"""Who is slow at computing: found after a while, told once, and never one that waits."""

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from ringtrain.runtime.processes import list_threads
from ringtrain.watchdog import stragglers
from ringtrain.watchdog.stragglers import LOOKS_PER_WINDOW, Looks, RankTotals, Stragglers, describe_slow, find_slow


@pytest.mark.parametrize(
    ("shares", "slow"),
    [
        ({0: 0.3, 1: 0.95, 2: 0.3}, [1]),
        ({0: 1.0, 1: 0.0}, [0]),
        ({0: 0.6, 1: 1.0, 2: 0.6}, []),
        ({0: 0.6, 1: 0.2, 2: 0.2}, []),  # busier than the others, but they do not wait for it
        ({0: 0.0, 1: 0.0}, []),
        ({0: 1.0}, []),
        ({0: 1.0, 1: 0.95, 2: 0.2, 3: 0.2, 4: 0.2}, [0, 1]),
    ],
)
def test_who_is_always_at_work_while_the_others_wait_is_slow(shares: dict[int, float], slow: list[int]) -> None:
    assert list(find_slow({rank: RankTotals(100, 100 * share) for rank, share in shares.items()})) == slow


@pytest.mark.parametrize(
    ("shares", "slow"),
    [((0.7, 0.95, 0.72), [1]), ((0.8, 0.94, 0.8), []), ((0.7, 0.85), [1]), ((0.04, 0.06), []), ((0.95, 0.95), [])],
)
def test_a_rank_whose_own_part_of_a_step_is_a_fifth_longer_is_slow(shares: Sequence[float], slow: list[int]) -> None:
    assert list(find_slow({rank: RankTotals(30, 30, 40.0, 40 * share) for rank, share in enumerate(shares)})) == slow


def test_without_a_clock_on_one_rank_all_are_sampled() -> None:
    assert find_slow({0: RankTotals(30, 10), 1: RankTotals(30, 30, 40.0, 10.0)}) == {
        1: "it is at work 100% of the time, they are 33%"
    }


def look(stragglers: Stragglers, counts: dict[int, RankTotals], shares: dict[int, float], times: int) -> list[int]:
    """Who is told while all are looked at so many times; each could run at this share of the looks."""
    told: list[int] = []
    for number in range(times):
        for rank, share in shares.items():
            before = counts.get(rank, RankTotals(0, 0))
            counts[rank] = RankTotals(before.looks + 1, before.runnable + (number % 10 < 10 * share))
        told += stragglers.compare(counts)
    return told


SLOW, EVEN = {0: 0.3, 1: 1.0}, {0: 0.3, 1: 0.3}


def test_a_straggler_is_reported_once_after_two_windows() -> None:
    stragglers, counts = Stragglers(), dict[int, RankTotals]()
    assert look(stragglers, counts, SLOW, 2 * LOOKS_PER_WINDOW) == []
    assert look(stragglers, counts, SLOW, 5 * LOOKS_PER_WINDOW) == [1]


def test_a_burst_is_no_straggler() -> None:
    stragglers, counts = Stragglers(), dict[int, RankTotals]()
    for _ in range(3):
        assert look(stragglers, counts, SLOW, LOOKS_PER_WINDOW) == []
        assert look(stragglers, counts, EVEN, 2 * LOOKS_PER_WINDOW) == []


def test_other_phases_start_a_new_window() -> None:
    stragglers, counts = Stragglers(), dict[int, RankTotals]()
    for _ in range(5):
        assert look(stragglers, counts, SLOW, LOOKS_PER_WINDOW - 1) == []
        assert stragglers.compare({}) == {}


@contextlib.contextmanager
def thread_that(works: Callable[[threading.Event], object]) -> Iterator[None]:
    ended = threading.Event()
    thread = threading.Thread(target=works, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def share_of(looks: Looks) -> float:
    before, runnable = looks.times, looks.times_runnable
    for _ in range(20):
        time.sleep(0.01)
        looks.look()
    return (looks.times_runnable - runnable) / (looks.times - before)


def sum_up(ended: threading.Event) -> None:
    while not ended.is_set():
        sum(range(100_000))


def test_only_a_process_that_computes_counts_as_busy() -> None:
    looks, former = Looks(), list_threads()
    looks.leave_out(former)  # pytest's, and TensorFlow's of other tests
    with thread_that(lambda ended: ended.wait()):
        assert share_of(looks) <= 0.2
    with thread_that(sum_up):
        assert share_of(looks) >= 0.7


def test_threads_that_are_busy_with_waiting_are_left_out() -> None:
    looks, former = Looks(), list_threads()
    with thread_that(sum_up):
        looks.leave_out(list_threads() | former)
        assert share_of(looks) == 0


def test_a_process_without_free_file_descriptors_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> set[int]:
        raise OSError(errno.EMFILE, "Too many open files", "/proc/self/task")

    looks = Looks()
    monkeypatch.setattr(stragglers, "list_threads", fail)
    looks.look()
    assert (looks.times, looks.times_runnable) == (0, 0)


def test_the_warning_names_rank_and_host() -> None:
    [why] = find_slow({0: RankTotals(30, 30, 10, 7), 1: RankTotals(30, 30, 10, 9.5)}).values()
    assert describe_slow(1, why, ["n1", "n7"]).startswith(
        "rank 1 on n7 is slow, and the others wait for it: without waits for others its steps take 95% of the time, "
        "theirs 70%."
    )
