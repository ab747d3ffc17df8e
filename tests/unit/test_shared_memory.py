"""Memory that ranks share: who gets it, and what becomes of the memory of results."""

from __future__ import annotations

import concurrent.futures
import errno
import mmap
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from ringtrain.collectives import shared_memory
from ringtrain.collectives.shared_memory import MAX_RESULTS, SharedSums, cut
from ringtrain.collectives.shared_window import (
    CHUNK_BYTES,
    LINE_BYTES,
    NAME,
    Buffers,
    Window,
    open_window,
    share_window,
)
from ringtrain.errors import LOST_RANK_SIGN


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


@pytest.mark.parametrize("which", ["a plain file", "no file", "no process"])
def test_what_is_not_the_memory_of_rank_0_is_not_taken_for_it(which: str, tmp_path: Path) -> None:
    """Another container's process may have the number that rank 0 has in its own."""
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(Window.num_bytes(2))
        process = 2**22 + 1 if which == "no process" else os.getpid()
        place = [process, 10**6 if which == "no file" else file.fileno(), "00" * 16]
        assert share_window(1, 2, lambda value: [place, None] if value is None else [True, value]) is None


@pytest.mark.parametrize("function", ["memfd_create", "ftruncate"])
def test_memory_that_cannot_be_had_ends_nothing(function: str) -> None:
    before, said = open_descriptors(), []

    def on_all(value: Any) -> list[Any]:
        said.append(value)
        return [value, None]

    with mock.patch.object(os, function, side_effect=OSError(27, "File too large")):
        assert share_window(0, 2, on_all) is None
    assert said == [None], "the others are told, and wait for nothing more"
    assert open_descriptors() == before


def test_nobody_takes_a_window_that_some_rank_does_not_get() -> None:
    before = open_descriptors()
    assert share_window(0, 2, lambda value: [value, False]) is None
    assert open_descriptors() == before


def test_another_memory_with_the_same_number_is_told_by_its_token() -> None:
    descriptor = os.memfd_create(NAME)
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
    for mine, place in zip(cut(values), cut(total), strict=True):
        assert mine.nbytes <= CHUNK_BYTES
        place[:] += mine
    np.testing.assert_array_equal(total, values)


def add_up_together(
    ranks: Sequence[SharedSums], arrays: Sequence[list[np.ndarray]], *, read_only: bool = True
) -> list[list[np.ndarray]]:
    """What each gets."""
    with concurrent.futures.ThreadPoolExecutor(len(ranks)) as pool:
        calls = [pool.submit(rank.add_up, 7, read_only, *mine) for rank, mine in zip(ranks, arrays, strict=True)]
        return [call.result(timeout=60) for call in calls]


def ranks_of(size: int) -> list[SharedSums]:
    """Ranks that are threads."""
    return [SharedSums(window, rank, size) for rank, window in enumerate(windows_of(size))]


def windows_of(size: int) -> list[Window]:
    descriptor = os.memfd_create("test")
    try:
        os.ftruncate(descriptor, Window.num_bytes(size))
        return [Window(descriptor, size) for _ in range(size)]
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("size", [2, 5])
def test_many_chunks_of_different_types_are_added_in_one_call(size: int) -> None:
    """Also chunks with fewer values than ranks, and none at all."""
    shapes = [((900_000,), "float32"), ((3,), "float64"), ((0, 4), "float32"), ((400, 700), "float64")]
    arrays = [
        [np.random.default_rng([rank, number]).integers(0, 100, shape).astype(dtype)
         for number, (shape, dtype) in enumerate(shapes)]
        for rank in range(size)
    ]  # fmt: skip
    expected = [np.sum(parts, axis=0, dtype=parts[0].dtype) for parts in zip(*arrays, strict=True)]
    ranks = ranks_of(size)
    for _ in range(4):  # in memory of each rank's own first, and then in that of all
        for *totals, squares in add_up_together(ranks, arrays):
            np.testing.assert_allclose(squares, [np.sum(np.square(right)) for right in expected], rtol=1e-6)
            for total, right in zip(totals, expected, strict=True):
                assert (total.dtype, total.shape) == (right.dtype, right.shape)
                np.testing.assert_array_equal(total, right)


@pytest.mark.parametrize("read_only", [True, False])
def test_what_is_summed_again_is_read_where_it_was_added(read_only: bool) -> None:
    ranks = ranks_of(2)
    arrays = [[np.full(600_000, rank, np.float32)] for rank in (1, 2)]
    are_shared = []
    for _ in range(4):
        (mine, _), (theirs, _) = add_up_together(ranks, arrays, read_only=read_only)
        files = {file_of(total) for total in (mine, theirs)}
        are_shared.append(len(files) == 1)
        assert mine.flags.writeable != are_shared[-1]
        del mine, theirs
    # A sum that is made once or twice needs no memory of all.
    assert are_shared == [False, False, read_only, read_only]


def file_of(array: np.ndarray) -> str:
    """Which part of which memory of all this is; an address of this process where it is none."""
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= address < end and "memfd" in line:
            return f"{line.split()[4]} {int(line.split()[2], 16) + address - begin}"
    return str(address)


def test_a_sum_of_another_shape_gets_memory_of_its_own() -> None:
    ranks = ranks_of(2)
    for _ in range(4):
        for length in (7, 5):
            for total, _ in add_up_together(ranks, [[np.full((length, 3), 1.0)]] * 2):
                np.testing.assert_array_equal(total, np.full((length, 3), 2.0))


@pytest.mark.parametrize("seed", range(3))
def test_a_result_that_some_rank_still_has_is_left_alone(seed: int) -> None:
    """Each keeps some of the results for a while, or for ever; none of them may change."""
    generator = np.random.default_rng(seed)
    size = 3
    ranks = ranks_of(size)
    kept: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in ranks]
    places = set()
    for _ in range(60):
        values = generator.integers(0, 100, (size, 5000)).astype(np.float32)
        right = values.sum(axis=0)
        for results, mine in zip(add_up_together(ranks, [[mine, np.ones(3)] for mine in values]), kept, strict=True):
            places.add(results[0].ctypes.data)
            if generator.random() < 0.2:
                mine.append((results[0], right))
            elif mine and generator.random() < 0.4:
                mine.pop(int(generator.integers(len(mine))))
            np.testing.assert_array_equal(results[0], right)
            del results
        for total, expected in (each for mine in kept for each in mine):
            np.testing.assert_array_equal(total, expected)
    assert [[len(results) for results in rank._results.values()] for rank in ranks] == [[MAX_RESULTS]] * size
    assert len(places) > size * MAX_RESULTS, "some had to be taken into memory of a rank's own"


@pytest.mark.parametrize(("module", "function"), [(os, "posix_fallocate"), (mmap, "mmap")])
def test_where_a_rank_gets_no_more_memory_all_take_their_sums(
    module: ModuleType, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_of(2)
    poor = ranks[1]._window.descriptor
    given = getattr(module, function)

    def give(descriptor: int, *arguments: Any, **named: Any) -> Any:
        if descriptor == poor:
            raise OSError(errno.ENOMEM, "no memory")
        return given(descriptor, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(module, function, give)
        for number in range(6):
            for total, _ in add_up_together(ranks, [[np.full(5, number, np.float64)]] * 2):
                assert total.flags.writeable
                np.testing.assert_array_equal(total, np.full(5, 2 * number))
    for number in range(6):  # another sum, for which there is some, at the same place for all
        for total, _ in add_up_together(ranks, [[np.full(6, number, np.float64)]] * 2):
            assert total.flags.writeable == (number < 2)
            np.testing.assert_array_equal(total, np.full(6, 2 * number))
            del total


WHOLE = {
    "product": lambda total: 3 * total,
    "negative": tf.negative,
    "relu": tf.nn.relu,
    "sum": lambda total: tf.add_n([total, tf.ones_like(total)]),
    "scattered": lambda total: tf.tensor_scatter_nd_add(total, [[0, 0]], [5.0]),
    "clipped": lambda total: tf.clip_by_global_norm([total], 1.0)[0],
    "flat": lambda total: tf.reshape(total, [-1]) / 2,
    "biased": lambda total: tf.nn.bias_add(total, tf.ones(512)),
    "slice": lambda total: -total[:256],
}
PARTS = {
    "split": lambda total: tf.split(total, 2)[0] * 3,
    "row": lambda total: tf.unstack(total)[0] + 1,
}


@pytest.mark.parametrize(
    ("name", "is_kept", "is_left_alone"),
    [
        *((name, False, True) for name in WHOLE),
        *((name, True, True) for name in PARTS),
        *((name, False, False) for name in PARTS),  # for which the totals have to be kept
    ],
)
def test_tensorflow_computes_nothing_into_memory_of_all(name: str, is_kept: bool, is_left_alone: bool) -> None:
    """It uses the memory of a tensor that nobody needs any more for the next one."""
    shared = memory_that_tensorflow_takes_over()

    @tf.function
    def step() -> list[tf.Tensor]:
        total = as_tensor(shared)
        changed = (WHOLE | PARTS)[name](total)
        return [changed, total] if is_kept else [changed]

    shared[:] = -2
    for _ in range(2):
        step()
    assert (shared == -2).all() == is_left_alone


@pytest.mark.parametrize(("num_rows", "is_left_alone"), [(512, True), (256, False)])
def test_a_variable_may_take_over_a_total_but_no_part_of_one(num_rows: int, is_left_alone: bool) -> None:
    shared = memory_that_tensorflow_takes_over()
    variable = tf.Variable(tf.zeros([num_rows, 512]))

    @tf.function
    def take_over() -> tf.Tensor:
        total = as_tensor(shared)
        variable.assign(tf.split(total, 512 // num_rows)[0])
        return total

    shared[:] = 2
    take_over()
    variable.assign_add(tf.ones(variable.shape))
    np.testing.assert_array_equal(variable, 3)
    assert (shared == 2).all() == is_left_alone


def memory_that_tensorflow_takes_over() -> np.ndarray:
    """float32 [512, 512]."""
    return Buffers().take((512, 512), np.dtype(np.float32))


def as_tensor(memory: np.ndarray) -> tf.Tensor:
    """What a sum gives in a graph."""
    return tf.ensure_shape(tf.numpy_function(lambda: memory[:], [], tf.float32), memory.shape)


@pytest.mark.filterwarnings("error")
def test_what_is_not_finite_shows_in_the_squares() -> None:
    values = [[[sign * np.inf, 1], [3e38, 0], [sign, 2]] for sign in (1, -1)]
    arrays = [[np.array(each, np.float32) for each in mine] for mine in values]
    for *totals, squares in add_up_together(ranks_of(2), arrays):
        assert np.isnan(totals[0][0])
        assert np.isposinf(totals[1][0])
        assert np.isfinite(squares).tolist() == [False, False, True]


def test_a_rank_that_sums_something_else_is_told() -> None:
    window = windows_of(2)[0]
    window.given[1], window.summed[1] = 1, 8
    with pytest.raises(RuntimeError, match="at different places of the program"):
        SharedSums(window, 0, 2).add_up(7, True, np.zeros(3))


def test_a_rank_whose_process_has_ended_is_not_waited_for() -> None:
    window = windows_of(2)[0]
    child = subprocess.Popen(["true"])
    child.wait()
    window.processes[:] = [os.getpid(), child.pid]
    with (
        mock.patch.object(shared_memory, "LOOK_SECONDS", 0.01),
        pytest.raises(RuntimeError, match=f"{LOST_RANK_SIGN}: rank 1"),
    ):
        SharedSums(window, 0, 2).add_up(7, True, np.zeros(3))
