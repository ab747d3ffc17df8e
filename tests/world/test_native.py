"""The native backend: its sums, what trains by them, and what becomes of a run that cannot have it."""

import functools
import re
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from ringtrain.collectives import Collective, with_native_sums
from ringtrain.collectives.gradients import GradientReduction
from ringtrain.collectives.groups import MIN_GROUP_BYTES, ONE_MESSAGE_BYTES
from ringtrain.collectives.horovod import HorovodCollective
from ringtrain.collectives.native import library
from ringtrain.collectives.native.backend import Native
from ringtrain.errors import UsageError
from tests.world import test_step
from tests.world.conftest import RunRingtrain
from tests.world.group import on_ranks
from tests.world.running import digest, events, final_checkpoint, running
from tests.world.test_collectives import assert_sums_of_all, poison, values_of_rank

pytestmark = pytest.mark.native
DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")


def horovod_of(collective: Collective) -> HorovodCollective:
    """Of the same ranks."""
    import horovod.tensorflow as hvd

    return HorovodCollective(collective.world, hvd)


@on_ranks(2, 3)
def test_tensors_of_all_types_are_summed_together(collective: Collective) -> None:
    """Of no value, of fewer than there are ranks, and of many chunks; from the third time on in memory of all."""
    world = collective.world
    assert isinstance(collective, Native)
    specs = [(shape, dtype) for shape in [(), (0, 3), (1,), (7, 3), (300, 1100)] for dtype in DTYPES]
    numpy_types = {"bfloat16": "float32"}

    def of(rank: int) -> list[np.ndarray]:
        return [values_of_rank(rank, shape, numpy_types.get(dtype, dtype)) for shape, dtype in specs]

    mine = [tf.cast(values, dtype) for values, (_, dtype) in zip(of(world.rank), specs, strict=True)]
    expected = [np.sum(parts, axis=0, dtype=parts[0].dtype) for parts in zip(*map(of, range(world.size)), strict=True)]
    for read_only in (False, True):
        add = functools.partial(collective.sum_in_order, read_only=read_only)
        in_graph = tf.function(functools.partial(add, name=f"graph/{read_only}"), autograph=False)
        for totals in (add(mine, name="eager"), *(in_graph(mine) for _ in range(5))):
            for tensor, total, right in zip(mine, totals.tensors, expected, strict=True):
                assert (total.dtype, total.shape) == (tensor.dtype, tensor.shape)
                np.testing.assert_array_equal(tf.cast(total, right.dtype), right)
            for (_, dtype), square, right in zip(specs, totals.squares.numpy(), expected, strict=True):
                if "int" not in dtype:
                    np.testing.assert_allclose(square, np.sum(np.square(right.astype(float))), rtol=1e-6)


@on_ranks(2, 3)
def test_a_sum_is_unchanged_by_later_sums(collective: Collective) -> None:
    size = collective.world.size

    @tf.function(autograph=False)
    def add(tensor: tf.Tensor) -> Any:
        return collective.sum_in_order([tensor], name="kept", read_only=True)

    kept: list[tuple[tf.Tensor, float]] = []
    generator = np.random.default_rng(collective.world.rank)  # each rank keeps others
    for step in range(60):
        [total] = add(tf.fill([50_000], float(step))).tensors
        kept.append((total, float(size * step)))
        del total
        while len(kept) > generator.integers(1, 6):
            kept.pop(int(generator.integers(len(kept))))
        for earlier, expected in kept:
            np.testing.assert_array_equal(earlier, np.full(50_000, expected))


@on_ranks(2)
def test_tensorflow_does_not_write_into_shared_memory(collective: Collective) -> None:
    """TensorFlow takes the memory of what nobody needs any more; here it would end the process."""
    rank = collective.world.rank
    variable = tf.Variable(tf.zeros([512, 256]))

    @tf.function(autograph=False)
    def compute(values: tf.Tensor) -> Any:
        [total] = collective.sum_in_order([values], name="used", read_only=True).tensors
        variable.assign(total)
        variable.assign_add(tf.ones_like(total))
        changed = [
            3 * total, -total, tf.nn.relu(total), tf.add_n([total, tf.ones_like(total)]), total[:9] + 1,
            tf.split(total, 2)[0] * 3, tf.unstack(total)[0] + 1, tf.clip_by_global_norm([total], 1.0)[0],
            tf.tensor_scatter_nd_add(total, [[0, 0]], [5.0]), tf.nn.bias_add(total, tf.ones(256)),
        ]  # fmt: skip
        return total, changed

    for step in range(8):
        total, changed = compute(tf.fill([512, 256], float(rank + step)))
        right = 2.0 * step + 1
        np.testing.assert_array_equal(total, np.full((512, 256), right))
        np.testing.assert_array_equal(variable, np.full((512, 256), right + 1))
        assert [float(tf.reshape(each, [-1])[-1]) for each in changed[:4]] == [3 * right, -right, right, right + 1]
        del total, changed


@on_ranks(2, 3)
def test_nonfinite_values_are_seen_by_all_and_large_ones_pass(collective: Collective) -> None:
    rank, size = collective.world.rank, collective.world.size
    shapes = [(4,), (MIN_GROUP_BYTES, 2), (3, 2), (ONE_MESSAGE_BYTES,)]
    control, state = tf.fill([3], 1e20), [tf.constant([1.0, float(rank)]), tf.constant(2.0, tf.float64)]
    with mock.patch.object(collective, "overlaps_compute", False):
        reduce = tf.function(GradientReduction(collective=collective), autograph=False)
        gradients = [values_of_rank(rank, shape, "float32") for shape in shapes]
        reduced = reduce([tf.constant(gradient) for gradient in gradients], control, state)
        assert_sums_of_all(reduced, shapes, control, size)
        np.testing.assert_array_equal(reduced.state[0], [size, sum(range(size))])
        assert float(reduced.state[1]) == 2 * size
        for index, bad in ((0, np.nan), (1, np.nan), (1, np.inf), (3, -np.inf), (3, 1e30)):
            mine = [tf.constant(gradient) for gradient in gradients]
            if rank == size - 1:
                mine[index] = poison(mine[index], bad)
            reduced = reduce(mine, control, state)
            assert bool(reduced.is_finite) == np.isfinite(bad), (index, bad)
        signed = [tf.constant([np.inf if rank == 0 else -np.inf])]
        assert not bool(reduce(signed, control, state).is_finite)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
@on_ranks(2, 3)
def test_compressed_gradients_are_summed_at_once_and_in_groups(collective: Collective, compression: Any) -> None:
    shapes = [(4,), (MIN_GROUP_BYTES, 2), (3, 2), (ONE_MESSAGE_BYTES,)]
    gradients = [tf.constant(values_of_rank(collective.world.rank, shape, "float32")) for shape in shapes]
    for in_groups in (False, True):
        reduction = GradientReduction(
            collective=collective, compression=compression, in_groups=in_groups, name=f"{compression}/{in_groups}"
        )
        reduce, control = tf.function(reduction, autograph=False), tf.fill([3], 1e20)
        for _ in range(3):
            assert_sums_of_all(reduce(gradients, control), shapes, control, collective.world.size)


@on_ranks(2, 3)
def test_bfloat16_is_summed_to_pieces_and_gathered(collective: Collective) -> None:
    """Horovod, which carries such calls in other types, has none."""
    rank, size = collective.world.rank, collective.world.size
    values = tf.cast(values_of_rank(rank, (size * 5,), "float32"), tf.bfloat16)
    total = np.sum([values_of_rank(each, (size * 5,), "float32") for each in range(size)], axis=0)
    mine = collective.reduce_scatter(values, name="pieces")
    np.testing.assert_array_equal(tf.cast(mine, tf.float32), total[rank * 5 : (rank + 1) * 5])
    whole = collective.all_gather(mine, name="whole")
    np.testing.assert_array_equal(tf.cast(whole, tf.float32), total)


@on_ranks(2)
def test_horovod_refuses_bf16(collective: Collective) -> None:
    with pytest.raises(UsageError, match=r"'bf16', but Horovod over MPI sums .* Use --compression fp16"):
        GradientReduction(collective=horovod_of(collective), compression="bf16")


@pytest.mark.parametrize(
    ("model", "optimizer", "accumulate", "num_samples"),
    [
        ("regularised", "adam", 3, 45),
        ("embedding", "momentum", 1, 46),
        ("regularised", "momentum", 1, 46),
        ("regularised", "clipped", 1, 46),
    ],
)
@on_ranks(2, slow=[3])
def test_n_ranks_over_horovod_equal_one_process(
    collective: Collective, model: str, optimizer: str, accumulate: int, num_samples: int
) -> None:
    """As on GPUs and between nodes."""
    test_step.test_n_ranks_equal_one_process.body(horovod_of(collective), model, optimizer, accumulate, num_samples)


@on_ranks(2)
def test_mismatched_sums_are_an_error_on_every_rank(collective: Collective) -> None:
    """On every rank, and for good: not at the next sum by chance."""
    native = with_native_sums(horovod_of(collective))  # as it will sum no more
    rank = collective.world.rank
    for number in range(2):
        with pytest.raises(tf.errors.AbortedError, match="the ranks are at different places of the program"):
            native.sum_in_order([tf.zeros([3 + rank])], name=f"other/{number}")


@on_ranks(2)
def test_a_rank_without_the_library_is_reported_on_all(collective: Collective) -> None:
    carrier = horovod_of(collective)
    on_rank_1 = None if collective.world.rank == 1 else library.load_operations()
    with mock.patch.object(library, "load_operations", return_value=on_rank_1):
        with pytest.raises(UsageError, match=r"backend is 'native'.*libringtrain.so is not there.* Use --backend auto"):
            with_native_sums(carrier, "native")
        assert with_native_sums(carrier) is carrier
    assert re.search("Horovod over .*: libringtrain.so", carrier.description)


def test_a_run_trains_the_same_bits_as_by_the_other_backend(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    """Of two ranks there is one sum."""
    digests = []
    for backend in ("horovod", "auto"):  # "native": tests/world/test_without_horovod.py
        arguments = ["--steps", "20", "--seed", "1", "--deterministic", "true", "--backend", backend]
        finished = run_ringtrain([*arguments, "--out", tmp_path / backend], launcher="mpirun")
        assert finished.rc == 0, finished.stderr
        digests.append(digest(final_checkpoint(tmp_path / backend, 20)))
    assert re.search("communication: Horovod over MPI, (gradients|short sums) natively", finished.stdout)
    assert len(set(digests)) == 1


@pytest.mark.slow
def test_a_killed_rank_is_answered(tmp_path: Path) -> None:
    out = tmp_path / "run"
    slow = {"RINGTRAIN_TEST_STEP_SECONDS": "0.1"}
    with running(out, "--epochs", "50", env=slow) as run:
        run.wait_for_step(3)
        run.signal_rank(1, signal.SIGKILL)
        assert run.wait(20) != 0, run.text()
        run.wait_until_gone()
    assert "Traceback" not in run.text()
    assert len(events(out, "start")) == 1
