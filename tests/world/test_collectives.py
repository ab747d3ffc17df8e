"""What the ranks say to each other, and the reduction of gradients, under every world."""

import contextlib
import functools
import os
import threading
from collections.abc import Collection
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.collectives import (
    Collective,
    all_gather_object,
    connect,
    raise_on_all_ranks,
    run_on_rank0,
    with_native_sums,
)
from ringtrain.collectives.context import use_collective
from ringtrain.collectives.differentiable import all_gather
from ringtrain.collectives.gradients import GradientReduction, check_finite, merge_rows
from ringtrain.collectives.groups import ONE_MESSAGE_BYTES
from ringtrain.collectives.horovod import LOWEST_PRIORITY, HorovodCollective
from ringtrain.collectives.native.backend import Native
from ringtrain.errors import DataError, RingtrainError, UsageError
from ringtrain.run.variables import broadcast_variables
from ringtrain.runtime.processes import list_threads
from tests.world.group import BY_MPI, GLOO, on_ranks


def values_of_rank(rank: int, shape: tuple[int, ...], dtype: str = "float64") -> np.ndarray:
    """Values that differ by rank and place, with sums that float16 can hold exactly."""
    return (np.random.default_rng(rank).integers(-64, 64, shape) / 8).astype(dtype)


def values_of_all(size: int, shape: tuple[int, ...], dtype: str = "float64") -> list[np.ndarray]:
    return [values_of_rank(rank, shape, dtype) for rank in range(size)]


@pytest.mark.parametrize("in_graph", [True, False])
@on_ranks(1, 2, 3)
def test_gradients_of_a_public_gather_are_those_of_all_ranks(collective: Collective, in_graph: bool) -> None:
    """Rank r has r rows; each rank does something else with all of them."""
    rank, size = collective.world.rank, collective.world.size
    rows = tf.constant([rank * 10.0 + i for i in range(rank)], tf.float64)
    number = size * (size - 1) // 2

    def factors(of: int) -> np.ndarray:
        return np.arange(1.0, number + 1) ** (of + 1)

    def compute(rows: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(rows)
            whole = all_gather(rows)
            objective = tf.reduce_sum(whole * factors(rank))
        return whole, tape.gradient(objective, rows)

    with use_collective(collective):
        whole, gradient = (tf.function(compute) if in_graph else compute)(rows)
        numbers = all_gather(tf.constant([rank], tf.int32))
    np.testing.assert_array_equal(whole, [r * 10.0 + i for r in range(size) for i in range(r)])
    mine = slice(rank * (rank - 1) // 2, rank * (rank - 1) // 2 + rank)
    np.testing.assert_allclose(gradient, np.sum([factors(r) for r in range(size)], axis=0)[mine])
    np.testing.assert_array_equal(numbers, range(size))


@on_ranks(1, 2, 3, GLOO, BY_MPI)
def test_sum_adds_over_all_ranks(collective: Collective) -> None:
    world = collective.world
    shapes = [(), (3,), (2, 5), (0,)]
    for dtype in ("float16", "float32", "float64", "int32", "int64"):
        mine = [tf.constant(values_of_rank(world.rank, shape, dtype)) for shape in shapes]
        for tensors in (mine, mine[1:2]):  # a group, and a lone tensor
            sums = collective.all_reduce(tensors, name=f"sum/{dtype}/{len(tensors)}")
            for tensor, total in zip(tensors, sums, strict=True):
                expected = np.sum(values_of_all(world.size, tuple(tensor.shape), dtype), axis=0)
                np.testing.assert_array_equal(total, expected)
                assert total.dtype == dtype


@on_ranks(1, 2, 3, GLOO, BY_MPI)
def test_sum_works_in_a_graph(collective: Collective) -> None:
    rank, size = collective.world.rank, collective.world.size
    add = tf.function(lambda tensor: collective.all_reduce([tensor, 2 * tensor], name="graph"), autograph=False)
    for step in range(3):
        once, twice = add(tf.constant([float(rank + step)]))
        assert float(once[0]) == sum(range(size)) + step * size
        assert float(twice[0]) == 2 * float(once[0])


@pytest.mark.native
@on_ranks(1, 2, 3, GLOO, BY_MPI)
def test_an_ordered_sum_is_the_same_sum(collective: Collective) -> None:
    """Natively, and by nobody for one: eagerly and in a graph."""
    world = collective.world
    shapes = [(0,), (1,), (7, 3), (1200, 1100)]
    for dtype in ("float16", "float32", "float64"):
        mine = [tf.constant(values_of_rank(world.rank, shape, dtype)) for shape in shapes]
        expected = [np.sum(values_of_all(world.size, shape, dtype), axis=0, dtype=dtype) for shape in shapes]
        add = tf.function(functools.partial(collective.sum_in_order, name=f"ordered/{dtype}/graph"), autograph=False)
        for totals in (collective.sum_in_order(mine, name=f"ordered/{dtype}"), add(mine), add(mine)):
            for tensor, total, sum_of_all in zip(mine, totals.tensors, expected, strict=True):
                assert (total.dtype, total.shape) == (tensor.dtype, tensor.shape)
                np.testing.assert_array_equal(total, sum_of_all)
            if totals.squares is not None:
                np.testing.assert_allclose(
                    totals.squares, [np.sum(np.square(e.astype(float))) for e in expected], rtol=1e-6
                )
            assert (totals.squares is not None) == (world.size > 1)


@on_ranks(2, 3)
def test_an_ordered_sum_may_overlap_with_horovod_s_sums(collective: Collective) -> None:
    rank, size = collective.world.rank, collective.world.size

    @tf.function(autograph=False)
    def add(step: tf.Tensor) -> list[tf.Tensor]:
        parts = [collective.all_reduce([step + rank + number], name=f"beside/{number}") for number in range(4)]
        ordered = collective.sum_in_order([tf.reshape(step + rank, [1])], name="beside/ordered").tensors
        return [each[0] for each in (ordered, *parts)]

    for step in range(50):
        [ordered], *parts = add(tf.constant(float(step)))
        assert float(ordered) == step * size + sum(range(size))
        assert [float(part) for part in parts] == [float(ordered) + number * size for number in range(4)]


@on_ranks(2, 3)
def test_horovods_threads_give_way_on_the_only_core_of_a_rank(collective: Collective) -> None:
    import horovod.tensorflow as hvd

    before = priorities_of(list_threads())
    end = threading.Event()
    waiting = threading.Thread(target=end.wait, args=(60,))
    waiting.start()
    assert waiting.native_id is not None
    try:
        for cores, expected in (({0, 1}, before[os.getpid()]), ({0}, LOWEST_PRIORITY)):
            its = HorovodCollective(collective.world, hvd, {waiting.native_id, 2**22 + 1})  # one has ended
            with mock.patch("os.sched_getaffinity", return_value=cores):
                shared = with_native_sums(its)
            assert isinstance(shared, Native)
            assert shared.overlaps_compute == (len(cores) > 1)
            assert priorities_of({waiting.native_id}) == {waiting.native_id: expected}
        after = priorities_of(before)
        assert os.getpid() in after
        assert after == {thread: before[thread] for thread in after}
    finally:
        end.set()
        waiting.join()


def priorities_of(threads: Collection[int]) -> dict[int, int]:
    """Of those that have not ended."""
    priorities = {}
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):
            priorities[thread] = os.getpriority(os.PRIO_PROCESS, thread)
    return priorities


@pytest.mark.native
@on_ranks(2, 3, GLOO)
def test_horovod_reduces_everything_only_if_requested(collective: Collective) -> None:
    assert isinstance(collective, Native)
    asked_for = connect("horovod", collective.world)
    assert isinstance(asked_for, HorovodCollective)
    mine = tf.constant(values_of_rank(collective.world.rank, (5,)))
    [by_horovod], [natively] = (each.sum_in_order([mine], name="asked").tensors for each in (asked_for, collective))
    np.testing.assert_array_equal(by_horovod, natively)


@on_ranks(1, 2, 3, GLOO, BY_MPI)
def test_gather_joins_parts_of_any_length_in_rank_order(collective: Collective) -> None:
    rank, size = collective.world.rank, collective.world.size
    for empty in (range(0), *(range(other, other + 1) for other in range(size)), range(size)):
        lengths = [0 if other in empty else other + 2 for other in range(size)]
        mine = values_of_rank(rank, (9, 2))[: lengths[rank]]
        joined = collective.all_gather(tf.constant(mine), name=f"gather/{empty}")
        parts = [part[:length] for part, length in zip(values_of_all(size, (9, 2)), lengths, strict=True)]
        np.testing.assert_array_equal(joined, np.concatenate(parts))


@on_ranks(1, 2, 3, GLOO, BY_MPI)
def test_broadcast_gives_every_rank_the_values_of_rank_0(collective: Collective) -> None:
    shapes = [(), (3,), (2, 5)]
    for dtype in ("float32", "float64", "int64"):
        mine = [tf.constant(values_of_rank(collective.world.rank, shape, dtype)) for shape in shapes]
        for shape, first in zip(shapes, collective.broadcast(mine, name=f"broadcast/{dtype}"), strict=True):
            np.testing.assert_array_equal(first, values_of_rank(0, shape, dtype))


@on_ranks(BY_MPI)
def test_every_bit_of_every_type_arrives(collective: Collective) -> None:
    """Natively they are summed as whole numbers: no zero loses its sign, and what is no number stays the same."""
    rank, ranks = collective.world.rank, range(collective.world.size)
    odd = [-0.0, 0.0, 1.5, -np.inf, 5e-324, *np.array([0x7FF0000000000001, -1]).view(np.float64)]

    def of(rank: int) -> list[tf.Tensor]:
        return [
            *(tf.cast(tf.constant(odd[rank:]), dtype) for dtype in ("float16", "bfloat16", "float32")),
            tf.constant(odd[rank:], tf.float64),
            tf.constant([complex(value, -0.0) for value in odd], tf.complex128)[rank:],
            tf.constant([[-128, 127], [rank, -1]], tf.int8),
            tf.constant([[255], [rank]], tf.uint8),
            tf.constant([rank == 1, True]),
        ]

    for number, mine in enumerate(of(rank)):
        joined = collective.all_gather(mine, name=f"bits/{number}").numpy()
        assert joined.tobytes() == b"".join(of(other)[number].numpy().tobytes() for other in ranks), mine.dtype
    same_shapes = [values[-2:] for values in of(rank)]
    for first, got in zip(of(0), collective.broadcast(same_shapes, name="bits"), strict=True):
        assert got.numpy().tobytes() == first[-2:].numpy().tobytes(), first.dtype


@on_ranks(1, 2, 3, GLOO, BY_MPI)
def test_gather_objects_gives_every_value_to_every_rank(collective: Collective) -> None:
    def value_of(rank: int) -> Any:
        return {"rank": rank, "text": "ä" * rank * 100, "list": [None, 1.5, True][: rank + 1]}

    assert all_gather_object(collective, value_of(collective.world.rank), name="objects") == [
        value_of(rank) for rank in range(collective.world.size)
    ]


@on_ranks(2, 3, GLOO, BY_MPI)
def test_ranks_at_different_collectives_do_not_mix_values(collective: Collective) -> None:
    rank, size = collective.world.rank, collective.world.size
    with pytest.raises(RingtrainError, match=f"rank 0 at 'here', rank {size - 1} at 'there'"):
        all_gather_object(collective, rank, name="there" if rank == size - 1 else "here")
    assert all_gather_object(collective, rank, name="again") == list(range(size))


@on_ranks(1, 2, 3)
def test_an_error_on_any_rank_becomes_the_same_error_on_all(collective: Collective) -> None:
    rank, size = collective.world.rank, collective.world.size
    for failing in range(size):

        def fail(failing: int = failing) -> str:
            if rank == failing:
                raise DataError(f"no file on {failing}")
            return "fine"

        with pytest.raises(DataError, match=f"no file on {failing}") as caught:
            raise_on_all_ranks(collective, fail, name=f"agree/{failing}")
        assert caught.value.reach == "run"
        messages = all_gather_object(collective, str(caught.value), name=f"messages/{failing}")
        assert len(set(messages)) == 1
        assert size == 1 or f"rank {failing} of {size}" in messages[0]


@on_ranks(2, 3)
def test_an_error_of_all_ranks_is_raised_without_rank_names(collective: Collective) -> None:
    def fail() -> None:
        raise UsageError("no such optimizer")

    with pytest.raises(UsageError) as caught:
        raise_on_all_ranks(collective, fail, name="alike")
    assert str(caught.value) == "no such optimizer"


@on_ranks(3)
def test_of_different_errors_the_first_rank_s_counts(collective: Collective) -> None:
    rank = collective.world.rank

    def fail() -> None:
        if rank == 1:
            raise DataError("bad file")
        if rank == 2:
            raise UsageError("bad flag")

    with pytest.raises(DataError, match=r"ranks 1, 2 of 3 .*bad file"):
        raise_on_all_ranks(collective, fail, name="different")


@on_ranks(1, 2, 3)
def test_raise_on_all_ranks_returns_each_rank_s_result(collective: Collective) -> None:
    assert raise_on_all_ranks(collective, lambda: collective.world.rank * 2, name="own") == collective.world.rank * 2


@pytest.mark.parametrize("fails", [False, True])
@on_ranks(2)
def test_a_forked_process_makes_no_collective_call(collective: Collective, fails: bool) -> None:
    parent, children = os.getpid(), []

    def fork() -> None:
        children.append(os.fork())
        if fails and os.getpid() != parent:
            raise DataError("of the forked process")

    try:
        raise_on_all_ranks(collective, fork, name="forked")
    except RingtrainError as error:
        if os.getpid() == parent:
            raise
        os._exit(0 if isinstance(error.__context__, DataError) == fails else 1)
    if os.getpid() != parent:
        os._exit(2)
    assert os.waitpid(children[0], 0)[1] == 0


@on_ranks(1, 2, 3)
def test_run_on_rank0_acts_once_and_broadcasts_the_result(collective: Collective) -> None:
    calls: list[int] = []

    def act() -> list[int]:
        calls.append(collective.world.rank)
        return [7, collective.world.rank]

    assert run_on_rank0(collective, act, name="first") == [7, 0]
    assert calls == ([0] if collective.world.rank == 0 else [])


@on_ranks(2, 3)
def test_an_error_in_run_on_rank0_reaches_all(collective: Collective) -> None:
    def fail() -> None:
        raise RingtrainError("disk full")

    with pytest.raises(RingtrainError, match="disk full"):
        run_on_rank0(collective, fail, name="first/error")


@on_ranks(2)
def test_one_rank_of_several_may_not_train_alone(collective: Collective) -> None:
    with pytest.raises(UsageError, match="solo"):
        connect("solo", collective.world)


def mixed_gradients(rank: int, *, is_empty: bool = False) -> list[Any]:
    """Dense gradients of three types, and sparse ones with rows in common among ranks and within one."""
    dense = [tf.constant(values_of_rank(rank, shape, dtype)) for shape, dtype in MIXED]
    rows = [] if is_empty else [1, 4, 1, rank]
    values = tf.constant(values_of_rank(rank, (4, 2), "float32"))[: len(rows)]
    sparse = tf.IndexedSlices(values, tf.constant(rows, tf.int64), tf.constant([6, 2]))
    return [dense[0], sparse, *dense[1:]]


MIXED = [((3, 2), "float32"), ((4,), "float64"), ((), "float32"), ((5,), "float16"), ((2,), "float64")]


def dense_sum(gradients_of_ranks: list[list[Any]]) -> list[np.ndarray]:
    return [
        np.sum([tf.convert_to_tensor(part) for part in parts], axis=0)
        for parts in zip(*gradients_of_ranks, strict=True)
    ]


@pytest.mark.parametrize(
    ("compression", "compiled"),
    [("none", False), ("none", True), ("fp16", False), pytest.param("bf16", True, marks=pytest.mark.native)],
)
@on_ranks(1, 2, 3, GLOO, BY_MPI)
def test_the_reduction_is_the_sum_of_the_ranks_gradients(
    collective: Collective, compression: str, compiled: bool
) -> None:
    world = collective.world
    reduction = GradientReduction(collective=collective, compression=compression)  # type: ignore[arg-type]
    reduce = tf.function(reduction, autograph=False) if compiled else reduction
    for empty_rank in (None, *range(world.size)):
        ranks = [mixed_gradients(rank, is_empty=rank == empty_rank) for rank in range(world.size)]
        reduced = reduce(ranks[world.rank])
        assert bool(reduced.is_finite)
        expected = dense_sum(ranks)
        for given, total, right in zip(ranks[0], reduced.gradients, expected, strict=True):
            assert total.dtype == given.dtype
            np.testing.assert_array_equal(tf.convert_to_tensor(total), right)
        norm = np.sqrt(sum(np.sum(np.square(value.astype("float64"))) for value in expected))
        np.testing.assert_allclose(reduced.global_norm, norm, rtol=1e-6)


@on_ranks(1, 2, 3)
def test_a_reduced_sparse_gradient_holds_each_row_once(collective: Collective) -> None:
    [sparse] = GradientReduction(collective=collective)([mixed_gradients(collective.world.rank)[1]]).gradients
    assert isinstance(sparse, tf.IndexedSlices)
    assert sorted(sparse.indices.numpy()) == sorted({1, 4, *range(collective.world.size)})


@pytest.mark.parametrize(
    ("compression", "bits", "holds_large"),
    [("fp16", 11, False), pytest.param("bf16", 8, True, marks=pytest.mark.native)],
)
@on_ranks(2)
def test_compression_sends_half_precision(
    collective: Collective, compression: Any, bits: int, holds_large: bool
) -> None:
    reduction = GradientReduction(collective=collective, compression=compression)
    values, control = tf.constant([1.0 + 2.0**-bits, 1.0 + 2.0 ** (1 - bits)]), tf.constant([1.0 + 2.0**-20])
    reduced = reduction([values], control)
    assert reduced.gradients[0].numpy().tolist() == [2.0, 2 * float(values[1])]
    assert reduced.control is not None
    assert float(reduced.control[0]) == 2 * float(control[0])
    reduced = GradientReduction(collective=collective, compression=compression, name="large")([tf.constant([1e6])])
    assert bool(reduced.is_finite) == holds_large


@on_ranks(1, 2, 3, GLOO, BY_MPI)
def test_a_value_that_is_not_finite_on_any_rank_is_seen_by_all(collective: Collective) -> None:
    rank, size = collective.world.rank, collective.world.size
    reduction = GradientReduction(collective=collective)
    for bad in (np.nan, np.inf, -np.inf):
        for bad_rank in range(size):
            for place in range(3):
                gradients = mixed_gradients(rank)[:3]
                if rank == bad_rank:
                    gradients[place] = poison(gradients[place], bad)
                assert not bool(reduction(gradients).is_finite), (bad, bad_rank, place)
    assert bool(reduction(mixed_gradients(rank)[:3]).is_finite)


def poison(gradient: Any, bad: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(poison(gradient.values, bad), gradient.indices, gradient.dense_shape)
    values = gradient.numpy()
    values.flat[-1] = bad
    return tf.constant(values)


def assert_sums_of_all(reduced: Any, shapes: list[tuple[int, ...]], control: tf.Tensor, size: int) -> None:
    """Of ``values_of_rank`` and a control vector that is the same on all."""
    expected = [np.sum(values_of_all(size, shape), axis=0) for shape in shapes]
    for total, right in zip(reduced.gradients, expected, strict=True):
        np.testing.assert_array_equal(total, right)
    np.testing.assert_array_equal(reduced.control, size * control)
    norm = np.sqrt(sum(np.sum(np.square(right)) for right in expected))
    np.testing.assert_allclose(reduced.global_norm, norm, rtol=1e-6)
    assert bool(reduced.is_finite)


@pytest.mark.native
@on_ranks(2)
def test_a_small_model_and_ranks_of_one_core_send_one_message(collective: Collective) -> None:
    assert isinstance(collective, Native)
    small, large, control = tf.zeros([8]), tf.zeros([ONE_MESSAGE_BYTES // 4]), tf.zeros([3])  # float32
    for overlaps, gradient, is_one in ((True, small, True), (True, large, False), (False, large, True)):
        for read_only in (False, True):
            reduction = GradientReduction(collective=collective, read_only=read_only)
            with (
                mock.patch.object(collective, "overlaps_compute", overlaps),
                mock.patch.object(collective, "all_reduce", wraps=collective.all_reduce) as all_reduce,
                mock.patch.object(collective, "sum_in_order", wraps=collective.sum_in_order) as in_order,
            ):
                tf.function(reduction, autograph=False)([gradient], control)
            assert (in_order.call_count, all_reduce.call_count) == ((1, 0) if is_one else (0, 2))
            assert [call.kwargs["read_only"] for call in in_order.call_args_list] == [read_only] * is_one


@on_ranks(1, 2, 3)
def test_infinities_that_cancel_are_still_seen(collective: Collective) -> None:
    sign = 1.0 if collective.world.rank == 0 else -1.0
    assert not bool(GradientReduction(collective=collective)([tf.constant([sign * np.inf])]).is_finite)


@on_ranks(1, 2, 3)
def test_huge_finite_values_are_finite(collective: Collective) -> None:
    reduced = GradientReduction(collective=collective)([tf.constant([1e30, -1e30, 1.0]), tf.constant([0.5])])
    assert bool(reduced.is_finite)
    np.testing.assert_allclose(reduced.gradients[0], np.array([1e30, -1e30, 1.0]) * collective.world.size, rtol=1e-6)


@on_ranks(1)
def test_half_precision_values_whose_squares_overflow_are_finite(collective: Collective) -> None:
    is_finite, _ = check_finite([tf.constant([6e4, 6e4], tf.float16), tf.constant([1.0])])
    assert bool(is_finite)


@on_ranks(1)
def test_merged_rows_are_the_same_gradient(collective: Collective) -> None:
    rows = tf.constant([5, 0, 5, 2, 0, 5], tf.int64)
    sparse = tf.IndexedSlices(tf.constant(values_of_rank(0, (6, 3))), rows, tf.constant([7, 3]))
    merged = merge_rows(sparse)
    assert len(set(merged.indices.numpy())) == len(merged.indices) == 3
    np.testing.assert_array_equal(tf.convert_to_tensor(merged), tf.convert_to_tensor(sparse))


@on_ranks(1, 2, 3, GLOO, BY_MPI)
def test_first_values_reach_every_variable_of_every_type(collective: Collective) -> None:
    def create(rank: int) -> list[keras.Variable]:
        specs = [((3, 2), "float32"), ((), "int64"), ((4,), "float64"), ((0, 2), "float32"), ((1,), "int32")]
        return [keras.Variable(values_of_rank(rank, shape, dtype), dtype=dtype) for shape, dtype in specs]

    variables = create(collective.world.rank)
    broadcast_variables(variables, collective)
    for variable, first in zip(variables, create(0), strict=True):
        np.testing.assert_array_equal(variable.numpy(), first.numpy())
