"""Memory that ranks share: who gets it, and what becomes of the memory of results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ringtrain.collectives import shared_memory
from ringtrain.collectives.shared_memory import LINE_BYTES, Buffers, Window, cut, open_window, share_window


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_the_only_rank_gets_a_window_which_is_gone_with_it() -> None:
    before = open_descriptors()
    window = share_window(0, 1, lambda value: [value])
    assert window is not None
    assert (window.given.tolist(), window.added.tolist(), window.taken.tolist()) == ([0], [0], [0])
    assert "/memfd:ringtrain" in Path("/proc/self/maps").read_text()
    del window
    assert open_descriptors() == before
    assert "/memfd:ringtrain" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("place", [[os.getpid(), 0, "00"], [os.getpid(), 10**6, "00"], [2**22 + 1, 3, "00"]])
def test_what_is_not_the_memory_of_rank_0_is_not_taken_for_it(place: list[Any]) -> None:
    """Another container's process may have the number that rank 0 has in its own."""
    assert share_window(1, 2, lambda value: [place, None] if value is None else [True, value]) is None


def test_nobody_takes_a_window_that_some_rank_does_not_get() -> None:
    before = open_descriptors()
    assert share_window(0, 2, lambda value: [value, False]) is None
    assert open_descriptors() == before


def test_another_memory_with_the_same_number_is_told_by_its_token() -> None:
    descriptor = os.memfd_create(shared_memory.NAME)
    try:
        os.ftruncate(descriptor, Window.num_bytes(2))
        place = [os.getpid(), descriptor, "11" * 16]
        assert open_window(Path(f"/proc/self/fd/{descriptor}"), 2).token.sum() == 0
        said: list[Any] = []

        def on_all(value: Any) -> list[Any]:
            said.append(value)
            return [place, None] if len(said) == 1 else [True, value]

        assert share_window(1, 2, on_all) is None
        assert said == [None, None, False]
    finally:
        os.close(descriptor)


def test_where_cores_may_see_writes_in_another_order_nothing_is_shared() -> None:
    with mock.patch("platform.machine", return_value="aarch64"):
        assert share_window(0, 1, lambda value: [value]) is None


def test_memory_of_results_is_used_again_once_nobody_has_it() -> None:
    buffers, shape, dtype = Buffers(), (5, 3), np.dtype(np.float32)
    first, part = buffers.take(shape, dtype), buffers.take(shape, dtype)[1:]
    places = [first.ctypes.data, part.ctypes.data - 3 * dtype.itemsize]
    assert [place % LINE_BYTES for place in places] == [0, 0]
    third = buffers.take(shape, dtype)
    assert third.ctypes.data not in places
    del first
    assert buffers.take((3, 5), dtype).ctypes.data == places[0]
    del part
    assert {buffers.take(shape, dtype).ctypes.data for _ in range(3)} <= set(places)


def test_chunks_hold_each_value_once() -> None:
    values = np.arange(700_000, dtype=np.float64).reshape(700, 1000)
    total = np.zeros_like(values)
    for mine, place in cut(values, total):
        assert mine.nbytes <= shared_memory.CHUNK_BYTES
        place[:] += mine
    np.testing.assert_array_equal(total, values)
