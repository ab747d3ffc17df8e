"""``--shard_optimizer``: each rank updates its pieces of the weights, and all train what one process trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object, groups
from ringtrain.collectives.shards import ALIGNED
from ringtrain.errors import ReplicasDifferError, UsageError
from ringtrain.run.checkpoint import read_checkpoint
from ringtrain.run.store import find_checkpoint
from ringtrain.step.sharding import require_elementwise
from ringtrain.training.actions import require_same_pieces
from tests.world.conftest import RunRingtrain
from tests.world.group import GLOO, on_ranks
from tests.world.processes import REPOSITORY
from tests.world.test_native import horovod_of
from tests.world.training import (
    MODELS,
    NUM_CLASSES,
    NUM_FEATURES,
    OPTIMIZERS,
    assert_close,
    assert_same_bits_on_all_ranks,
    batches_of,
    check_trains_as_plainly,
    create_step,
    dense_samples,
    learning_rate_of,
    order_of,
    regularised_model,
    train,
    without_biases,
)

GLOBAL_BATCH_SIZE, STEPS, NUM_SAMPLES = 11, 7, 46


def constrained_model() -> keras.Model:
    """What a constraint makes of a weight depends on all of it."""
    constraint = keras.constraints.MaxNorm(0.4)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((NUM_FEATURES,)),
            layers.Dense(33, activation="tanh", kernel_constraint=constraint),
            layers.Dense(NUM_CLASSES),
        ]
    )


def smallest_model() -> keras.Model:
    """Of which most ranks have nothing."""
    return keras.Sequential([keras.Input((NUM_FEATURES,)), keras.layers.Dense(NUM_CLASSES, use_bias=False)])


ALL_MODELS: dict[str, Any] = {
    **MODELS,
    "constrained": (constrained_model, dense_samples),
    "smallest": (smallest_model, dense_samples),
}
ALL_OPTIMIZERS = {
    **OPTIMIZERS,
    "decay of kernels": lambda: without_biases(keras.optimizers.AdamW(0.01, weight_decay=0.1)),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.01),
}


@contextlib.contextmanager
def leaving(collective: Collective, *, in_groups: bool) -> Iterator[None]:
    """Gradients leave at once, or in groups, as those of large models do where ranks have several cores."""
    with (
        mock.patch.object(groups, "ONE_MESSAGE_BYTES", 0 if in_groups else 2**20),
        mock.patch.object(groups, "MIN_GROUP_BYTES", 100),
        mock.patch.object(collective, "overlaps_compute", in_groups),
    ):
        yield


ELEMENTWISE = ("momentum", "adamw", "rmsprop", "lion", "adagrad", "adadelta", "adamax", "ftrl")  # as adam is
CASES = {  # with whether gradients leave in groups: the update that follows does not depend on it
    ("regularised", "adam"): False,
    ("regularised", "decay of kernels"): True,
    ("regularised", "clipped"): True,
    ("regularised", "each clipped"): False,
    ("regularised", "values clipped"): True,
    ("regularised", "nadam"): False,
    ("regularised", "lamb"): False,
    ("regularised", "lars"): True,
    ("regularised", "adding up"): True,
    ("embedding", "momentum"): False,
    ("twin embeddings", "adam"): True,
    ("constrained", "adam"): False,
    ("smallest", "nadam"): False,
    ("smallest", "averaging"): True,
}


@pytest.mark.parametrize(("model", "optimizer", "in_groups"), [(*case, in_groups) for case, in_groups in CASES.items()])
@on_ranks(2)
def test_n_ranks_equal_one_process(collective: Collective, model: str, optimizer: str, in_groups: bool) -> None:
    create, create_samples = ALL_MODELS[model]
    source = create_samples(NUM_SAMPLES)
    batches = batches_of(source, collective, global_batch_size=GLOBAL_BATCH_SIZE, steps=STEPS)
    with leaving(collective, in_groups=in_groups):
        step = create_step(collective, create, ALL_OPTIMIZERS[optimizer], batches.element_spec, shard_optimizer=True)
        assert step.sharded is not None
        assert step.sharded._reduction.is_single_message != in_groups
        _, plain_optimizer = check_trains_as_plainly(
            step,
            batches,
            create,
            ALL_OPTIMIZERS[optimizer],
            source,
            collective,
            global_batch_size=GLOBAL_BATCH_SIZE,
            steps=STEPS,
        )
    slots = {**step.gather_shared_out(), **{name: v.numpy() for name, v in step.named_variables.items()}}
    if collective.world.is_rank0:
        mine = [slots[name] for name in step.names if name.startswith("slots/")]
        for value, right in zip(mine, plain_optimizer.variables, strict=True):
            assert_close(value, right.numpy(), right.path)


THREE_BY_DEFAULT = (
    ("regularised", "lamb"),
    ("regularised", "clipped"),
    ("embedding", "momentum"),
    ("smallest", "averaging"),
)


@pytest.mark.parametrize(
    ("model", "optimizer", "in_groups"),
    [  # each the other way than with two ranks
        *(
            pytest.param(*case, not in_groups, marks=() if case in THREE_BY_DEFAULT else pytest.mark.slow)
            for case, in_groups in CASES.items()
        ),
        *(
            pytest.param("regularised", name, place % 2 == 0, marks=pytest.mark.slow)
            for place, name in enumerate(ELEMENTWISE)
        ),
    ],
)
@on_ranks(3)
def test_three_ranks_equal_one_process(collective: Collective, model: str, optimizer: str, in_groups: bool) -> None:
    test_n_ranks_equal_one_process.body(collective, model, optimizer, in_groups)


@pytest.mark.parametrize(
    ("model", "optimizer", "in_groups"),
    [
        ("regularised", "clipped", True),
        ("smallest", "lamb", False),
        ("embedding", "adam", True),
    ],
)
@on_ranks(2)
def test_ranks_over_horovod_equal_one_process(
    collective: Collective, model: str, optimizer: str, in_groups: bool
) -> None:
    """As on GPUs and between nodes."""
    test_n_ranks_equal_one_process.body(horovod_of(collective), model, optimizer, in_groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "optimizer"), [("regularised", "lars"), ("smallest", "each clipped"), ("embedding", "adam")]
)
@on_ranks(3)
def test_three_ranks_over_horovod_equal_one_process(collective: Collective, model: str, optimizer: str) -> None:
    test_n_ranks_equal_one_process.body(horovod_of(collective), model, optimizer, True)


@pytest.mark.slow
@pytest.mark.parametrize("in_groups", [False, True])
@on_ranks(GLOO)
def test_ranks_over_gloo_train_it_as_well(collective: Collective, in_groups: bool) -> None:
    test_n_ranks_equal_one_process.body(collective, "regularised", "adam", in_groups)


@on_ranks(2)
def test_ranks_with_different_step_functions_reduce_by_horovod(collective: Collective) -> None:
    """The last step of an epoch has one sample: the ranks without any have a function of their own, and no loop."""
    carrier, source, global_batch_size = horovod_of(collective), dense_samples(25), 12
    batches = batches_of(source, carrier, global_batch_size=global_batch_size, steps=4)
    usual = order_of(source, global_batch_size).local_batch(0, rank=carrier.world.rank, size=carrier.world.size)
    for jit_compile in (False, True):
        with leaving(carrier, in_groups=True):
            step = create_step(
                carrier, MODELS["regularised"][0], OPTIMIZERS["clipped"], batches.element_spec, shard_optimizer=True,
                accumulate=2, local_batch_size=len(usual.indices), jit_compile=jit_compile,
            )  # fmt: skip
            train(step, batches)
        assert_same_bits_on_all_ranks(step.variables, carrier)


@on_ranks(3, slow=[2])
def test_each_rank_keeps_its_part_of_the_slots_alone(collective: Collective) -> None:
    def create() -> keras.Model:
        return keras.Sequential([keras.Input((NUM_FEATURES,)), keras.layers.Dense(500), keras.layers.Dense(3)])

    batches = batches_of(dense_samples(46), collective, global_batch_size=11, steps=1)
    step = create_step(collective, create, OPTIMIZERS["adam"], batches.element_spec, shard_optimizer=True)
    size, total = collective.world.size, 2 * step.model.count_params()
    mine = sum(int(np.prod(piece.shape)) for piece in step.named_pieces.values())
    assert abs(mine - total / size) <= 4 * ALIGNED
    assert sum(all_gather_object(collective, mine, name="sizes")) == total


@pytest.mark.parametrize(
    ("precision", "in_groups"),
    [
        ("float64", True),
        ("mixed_float16", False),
        pytest.param("float64", False, marks=pytest.mark.slow),
        pytest.param("mixed_float16", True, marks=pytest.mark.slow),
    ],
)
@on_ranks(3, slow=[2])
def test_a_nonfinite_value_on_one_rank_changes_no_shard(
    collective: Collective, precision: str, in_groups: bool
) -> None:
    """Or, of a finite loss, a gradient that its scale lets overflow."""
    overflows = precision == "mixed_float16"
    source = dense_samples(46, "float32" if overflows else "float64")
    batches = list(batches_of(source, collective, global_batch_size=12, steps=3))
    spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, batches[0])
    with leaving(collective, in_groups=in_groups):
        step = create_step(collective, named_model, OPTIMIZERS["adam"], spec, shard_optimizer=True, precision=precision)
        assert step.sharded is not None
        assert step.read(step(batches[0], 0.1)).is_finite
        held = [*step.model.variables, *step.optimizer.variables, *step.sharded.pieces]
        before = [variable.numpy() for variable in held]
        bad = batches[1]
        if collective.world.rank == 1:
            bad = bad._replace(x=bad.x * (1e3 if overflows else np.nan))
        report = step.read(step(bad, 0.1))
        assert not report.is_finite
        assert np.isfinite(report.loss) == overflows
        for variable, value in zip(held, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
        assert step.read(step(batches[2], 0.1)).is_finite


@pytest.mark.parametrize(
    "precision",
    ["mixed_float16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float32", "mixed_bfloat16"))],
)
@on_ranks(2)
def test_two_ranks_train_the_same_bits_sharded_and_not(collective: Collective, precision: str) -> None:
    """Of two summands there is one sum; with a loss scale, and averages of the weights."""
    source = dense_samples(46, "float32")
    batches = batches_of(source, collective, global_batch_size=12, steps=5)
    trained = []
    for shard_optimizer in (False, True):
        keras.utils.clear_session()
        step = create_step(
            collective, regularised_model, OPTIMIZERS["adam"], batches.element_spec,
            shard_optimizer=shard_optimizer, precision=precision, ema=0.9,
        )  # fmt: skip
        train(step, batches)
        values = {name: v.numpy() for name, v in step.named_variables.items()} | step.gather_shared_out()
        trained.append(values)
    if collective.world.is_rank0:
        assert trained[0].keys() == trained[1].keys()
        for name, value in trained[0].items():
            np.testing.assert_array_equal(trained[1][name], value, err_msg=name)


def model_with_a_float64_weight() -> keras.Model:
    """Which one rank has alone."""
    layers = keras.layers
    last = layers.Dense(NUM_CLASSES, use_bias=False, dtype="float64")
    return keras.Sequential([keras.Input((NUM_FEATURES,)), layers.Dense(33), layers.Dense(1), last])


def trained_in_single_precision(
    collective: Collective, create: Any, create_optimizer: Any, *, scale: float = 1.0
) -> list[list[np.ndarray]]:
    """The weights after two steps, the update not shared out and shared out, and before; inputs are of this scale."""
    source = dense_samples(46, "float32")
    batches = batches_of(source, collective, global_batch_size=12, steps=2)
    weights = []
    for shard_optimizer in (False, True):
        keras.utils.clear_session()
        step = create_step(
            collective, create, create_optimizer, batches.element_spec, shard_optimizer=shard_optimizer,
            precision="float32",
        )  # fmt: skip
        first = [variable.numpy() for variable in step.model.trainable_variables]
        assert all(report.is_finite for report in train(step, [b._replace(x=scale * b.x) for b in batches]))
        weights.append([variable.numpy() for variable in step.model.trainable_variables])
    return [*weights, first]


@pytest.mark.parametrize(
    ("model", "optimizer", "scale"),
    [
        ("a float64 weight", "lamb", 1.0),
        ("a float64 weight", "each clipped", 1.0),
        ("smallest", "each clipped", 1e21),  # whose squares float32 does not hold
    ],
)
@on_ranks(2)
def test_norms_are_those_of_all_types_and_sizes(
    collective: Collective, model: str, optimizer: str, scale: float
) -> None:
    create = model_with_a_float64_weight if model == "a float64 weight" else ALL_MODELS[model][0]
    plain, sharded, first = trained_in_single_precision(collective, create, OPTIMIZERS[optimizer], scale=scale)
    for number, (value, right) in enumerate(zip(sharded, plain, strict=True)):
        assert_close(value, right, str(number), 1e-6)
    assert all(np.any(value != before) for value, before in zip(sharded, first, strict=True)) or scale > 1


@on_ranks(2)
def test_a_norm_in_float16_does_not_overflow(collective: Collective) -> None:
    def create() -> keras.Model:
        dense = keras.layers.Dense(NUM_CLASSES, use_bias=False, dtype="float16")
        return keras.Sequential([keras.Input((NUM_FEATURES,)), dense])

    def create_optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.1, clipnorm=0.5)

    _, [sharded], [first] = trained_in_single_precision(collective, create, create_optimizer, scale=2000.0)
    moved = float(np.linalg.norm((sharded - first).astype(np.float32)))
    assert 0 < moved <= 0.5 * (learning_rate_of(0) + learning_rate_of(1)) * 1.01


@on_ranks(2)
def test_a_weight_changed_elsewhere_is_detected_on_all_ranks(collective: Collective) -> None:
    batches = batches_of(dense_samples(46), collective, global_batch_size=12, steps=2)
    step = create_step(collective, regularised_model, OPTIMIZERS["adam"], batches.element_spec, shard_optimizer=True)
    train(step, batches)
    assert step.sharded is not None
    require_same_pieces(step.sharded, collective, 2)
    step.model.trainable_variables[0].assign_add(
        tf.ones([NUM_FEATURES, 6], tf.float64)
    )  # in memory of all ranks, if any
    assert_same_bits_on_all_ranks(step.model.variables, collective)
    with pytest.raises(ReplicasDifferError, match=r"at step 2 this rank's piece of .*kernel.* is not what the ranks"):
        require_same_pieces(step.sharded, collective, 2)


@pytest.mark.parametrize("name", ["Adafactor", *(["Muon"] if "muon" in OPTIMIZERS else [])])
def test_an_optimizer_that_looks_at_whole_weights_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name}(| is element-wise) (is not element-wise|cannot be tried).* adamw"):
        require_elementwise(getattr(keras.optimizers, name)(0.01))


def test_whatever_its_learning_rate_is() -> None:
    """And however many gradients it adds up."""
    with pytest.raises(UsageError, match="Adafactor"):
        require_elementwise(keras.optimizers.Adafactor(1e-9, gradient_accumulation_steps=8))
    require_elementwise(keras.optimizers.Adam(1e-9, gradient_accumulation_steps=8))


class OwnSlots(keras.optimizers.Optimizer):
    """An element-wise optimizer, whose slots are made by themselves."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.sums = [self.add_variable(shape=v.shape, name="sum") for v in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        variable.assign_sub(tf.cast(learning_rate, variable.dtype) * gradient)


@on_ranks(2)
def test_slots_of_unknown_weights_are_refused(collective: Collective) -> None:
    batches = batches_of(dense_samples(46), collective, global_batch_size=12, steps=1)
    with pytest.raises(UsageError, match=r"OwnSlots has a variable \(.*sum.*\) that is neither one number nor made by"):
        create_step(collective, regularised_model, lambda: OwnSlots(0.1), batches.element_spec, shard_optimizer=True)


def named_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((NUM_FEATURES,)), layers.Dense(30, name="left_out"), layers.Dense(NUM_CLASSES, name="taken")]
    )


def without_a_layer() -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["left_out"])
    return optimizer


@on_ranks(2)
def test_layers_are_excluded_from_weight_decay_by_their_names(collective: Collective) -> None:
    batches = batches_of(dense_samples(46), collective, global_batch_size=12, steps=3)
    trained = []
    for shard_optimizer in (False, True):
        keras.utils.clear_session()
        step = create_step(
            collective, named_model, without_a_layer, batches.element_spec, shard_optimizer=shard_optimizer
        )
        uses = [step.optimizer._use_weight_decay(p.value) for p in step.optimizer._trainable_variables]
        train(step, batches)
        trained.append([uses, *[variable.numpy().tolist() for variable in step.model.variables]])
    assert trained[0] == trained[1]


@pytest.mark.parametrize(
    "create",
    [
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
        *([OPTIMIZERS["multi"]] if "multi" in OPTIMIZERS else []),
    ],
)
def test_an_optimizer_that_holds_others_is_refused(create: Any) -> None:
    with pytest.raises(UsageError, match=r"(LossScale|Multi)Optimizer holds other optimizers"):
        require_elementwise(create())


COMMAND = [
    "--workload", f"{REPOSITORY / 'tests/world/workloads/small.py'}:Small", "--precision", "float64",
    "--global_batch_size", "16", "--checkpoint_every", "0", "--eval_every_epochs", "0",
    "--optimizer.name", "adam", "--optimizer.lr", "0.001", "--optimizer.schedule", "constant",
]  # fmt: skip
SHARDED = ("--shard_optimizer", "true")


def run_to(run_ringtrain: RunRingtrain, out: Path, steps: int, np: int, *flags: str) -> dict[str, np.ndarray]:
    """What the newest checkpoint holds of a run that has gone on to some step, on so many ranks."""
    launcher = "mpirun" if np > 1 else None
    finished = run_ringtrain([*COMMAND, "--out", str(out), "--steps", str(steps), *flags], launcher=launcher, np=np)
    assert finished.rc == 0, finished.stdout + finished.stderr
    return dict(read_checkpoint(find_checkpoint(out)).variables)


def assert_same_checkpoint(found: dict[str, np.ndarray], right: dict[str, np.ndarray], what: str) -> None:
    assert found.keys() == right.keys()
    for variable, value in right.items():
        assert_close(found[variable], value, f"{what}: {variable}", 1e-10)


def test_a_run_resumes_on_other_ranks_sharded_or_not(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    """A checkpoint knows of neither: from two that share out to three that do not, and back."""
    right = run_to(run_ringtrain, tmp_path / "whole", 9, 1)
    run_to(run_ringtrain, tmp_path / "run", 3, 2, *SHARDED)
    run_to(run_ringtrain, tmp_path / "run", 6, 3)
    assert_same_checkpoint(run_to(run_ringtrain, tmp_path / "run", 9, 2, *SHARDED), right, "run")


@pytest.mark.slow
def test_a_sharded_run_resumes_on_another_number_of_ranks(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    right = run_to(run_ringtrain, tmp_path / "whole", 9, 1)
    out = tmp_path / "sharded"
    run_to(run_ringtrain, out, 3, 2, *SHARDED)
    run_to(run_ringtrain, out, 6, 3, *SHARDED)
    assert_same_checkpoint(run_to(run_ringtrain, out, 9, 1), right, "on one rank")


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["fp16", pytest.param("bf16", marks=pytest.mark.native)])
def test_compressed_gradients_are_sharded_too(run_ringtrain: RunRingtrain, tmp_path: Path, compression: str) -> None:
    half = ("--compression", compression)
    right = run_to(run_ringtrain, tmp_path / "not", 6, 2, *half)
    assert_same_checkpoint(run_to(run_ringtrain, tmp_path / "sharded", 6, 2, *half, *SHARDED), right, compression)
