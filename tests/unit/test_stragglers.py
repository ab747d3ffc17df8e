"""Who is slow at computing: found after a while, told once, and never one that waits."""

from __future__ import annotations

import threading
import time

import pytest

from ringtrain.guard.stragglers import BusyClock, Stragglers, describe_slow, find_slow, list_threads


@pytest.mark.parametrize(
    ("shares", "slow"),
    [
        ({0: 0.3, 1: 0.9, 2: 0.3}, [1]),
        ({0: 0.9, 1: 0.3}, [0]),
        ({0: 0.5, 1: 0.9, 2: 0.5}, []),
        ({0: 0.1, 1: 0.4, 2: 0.1}, []),  # nobody waits for a processor here
        ({0: 0.0, 1: 0.0}, []),
        ({0: 1.0}, []),
        ({0: 3.5, 1: 3.6, 2: 8.0}, [2]),
        ({0: 0.9, 1: 0.9, 2: 0.2, 3: 0.2, 4: 0.2}, [0, 1]),
    ],
)
def test_who_is_busy_for_much_longer_than_the_others_is_slow(shares: dict[int, float], slow: list[int]) -> None:
    assert list(find_slow(shares)) == slow


def look_for(stragglers: Stragglers, seconds: int, shares: dict[int, float], busy: dict[int, float]) -> list[int]:
    told: list[int] = []
    for _ in range(seconds):
        for rank, share in shares.items():
            busy[rank] = busy.get(rank, 0.0) + share
        told += stragglers.look(busy, 1.0)
    return told


def test_a_straggler_is_told_once_after_two_windows() -> None:
    stragglers, busy = Stragglers(10.0), dict[int, float]()
    assert look_for(stragglers, 20, {0: 0.3, 1: 0.9}, busy) == []
    assert look_for(stragglers, 50, {0: 0.3, 1: 0.9}, busy) == [1]


def test_a_burst_is_no_straggler_and_one_that_comes_again_is() -> None:
    stragglers, busy = Stragglers(10.0), dict[int, float]()
    for _ in range(3):
        assert look_for(stragglers, 10, {0: 0.3, 1: 0.9}, busy) == []
        assert look_for(stragglers, 20, {0: 0.3, 1: 0.3}, busy) == []


def test_what_is_no_training_begins_a_new_window() -> None:
    stragglers, busy = Stragglers(10.0), dict[int, float]()
    for _ in range(5):
        assert look_for(stragglers, 9, {0: 0.3, 1: 0.9}, busy) == []
        stragglers.look({}, 1.0)


def test_a_thread_that_works_is_busy_and_one_that_waits_is_not() -> None:
    clock, ended = BusyClock(), threading.Event()
    waiting = [threading.Thread(target=ended.wait) for _ in range(5)]
    for thread in waiting:
        thread.start()
    before = clock.read()
    start, end = time.monotonic(), time.thread_time() + 0.3
    while time.thread_time() < end:
        pass
    busy, wall = clock.read() - before, time.monotonic() - start
    assert 0.29 <= busy <= wall * 1.1 + 0.05
    before = clock.read()
    time.sleep(0.3)
    assert clock.read() - before < 0.1
    ended.set()
    for thread in waiting:
        thread.join()
    assert clock.read() >= before


def test_threads_that_are_busy_with_waiting_are_left_out() -> None:
    clock, ended = BusyClock(), threading.Event()
    before = list_threads()

    def spin() -> None:
        while not ended.is_set():
            pass

    spinning = threading.Thread(target=spin)
    spinning.start()
    clock.leave_out(list_threads() - before)
    start = clock.read()
    time.sleep(0.3)
    busy = clock.read() - start
    ended.set()
    spinning.join()
    assert busy < 0.15


def test_the_warning_names_rank_and_host() -> None:
    said = describe_slow(1, 0.9, 0.3, ["n1", "n7"])
    assert said.startswith("rank 1 on n7 slows the others down: it has a core busy, or waits for one, for 90% of the")
