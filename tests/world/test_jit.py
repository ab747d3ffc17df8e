"""``--jit_compile``: XLA compiles a rank's forward and backward pass, and all ranks train what one process trains."""

import contextlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain
from ringtrain import Sources
from ringtrain.collectives import Collective
from ringtrain.collectives.base import Solo
from ringtrain.config import Config
from ringtrain.data.order import SampleOrder
from ringtrain.errors import UsageError
from ringtrain.guard.labels import Labels
from ringtrain.messages.log import show_log
from ringtrain.runtime.world import World
from ringtrain.step.compiled import CompiledFunction
from ringtrain.training import creation
from ringtrain.training.job import create_job
from tests.world.conftest import RunRingtrain
from tests.world.group import on_ranks
from tests.world.processes import REPOSITORY
from tests.world.training import (
    MODELS,
    NUM_CLASSES,
    NUM_FEATURES,
    NUM_WORDS,
    OPTIMIZERS,
    Classification,
    assert_close,
    batches_of,
    batchnorm_model,
    check_trains_as_plainly,
    create_step,
    dense_samples,
    make_batch,
    order_of,
    regularised_model,
    spec_of,
    train,
    word_samples,
)

GLOBAL_BATCH_SIZE, STEPS = 11, 6  # of 45 samples, the fifth step of an epoch has 1, so that one of two ranks has none


@pytest.mark.parametrize(
    ("model", "optimizer", "accumulate", "num_samples", "shard_optimizer"),
    [
        ("regularised", "momentum", 1, 46, False),
        ("embedding", "adam", 3, 45, True),
    ],
)
@on_ranks(2)
def test_n_ranks_equal_one_process(
    collective: Collective, model: str, optimizer: str, accumulate: int, num_samples: int, shard_optimizer: bool
) -> None:
    create, create_samples = MODELS[model]
    source = create_samples(num_samples)
    batches = batches_of(source, collective, global_batch_size=GLOBAL_BATCH_SIZE, steps=STEPS)
    usual = order_of(source, GLOBAL_BATCH_SIZE).local_batch(0, rank=collective.world.rank, size=collective.world.size)
    step = create_step(
        collective,
        create,
        OPTIMIZERS[optimizer],
        batches.element_spec,
        accumulate=accumulate,
        local_batch_size=len(usual.indices),
        shard_optimizer=shard_optimizer,
        jit_compile=True,
    )
    assert step.compiled is not None
    assert list(step.labels) == [Labels(0, NUM_CLASSES)]
    check_trains_as_plainly(
        step,
        batches,
        create,
        OPTIMIZERS[optimizer],
        source,
        collective,
        global_batch_size=GLOBAL_BATCH_SIZE,
        steps=STEPS,
    )


@pytest.mark.slow
@on_ranks(1, 3)
def test_one_and_three_ranks_equal_one_process(collective: Collective) -> None:
    model = "embedding" if collective.world.size == 1 else "regularised"
    test_n_ranks_equal_one_process.body(collective, model, "adam", 3, 45, True)


def dropout_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((NUM_FEATURES,)), layers.Dense(20), layers.Dropout(0.5, seed=1), layers.Dense(NUM_CLASSES)]
    )


@pytest.mark.parametrize(
    "precision", ["float64", *(pytest.param(f"mixed_{of}16", marks=pytest.mark.slow) for of in ("float", "bfloat"))]
)
@pytest.mark.parametrize("model", ["dropout", "batchnorm"])
@on_ranks(2)
def test_compiled_steps_equal_uncompiled_ones(collective: Collective, model: str, precision: str) -> None:
    """BatchNorm's statistics as well. XLA draws other numbers from the same seeds: these are compared with its own."""
    create = {"dropout": dropout_model, "batchnorm": batchnorm_model}[model]
    source = dense_samples(46, "float64" if precision == "float64" else "float32")
    batches = batches_of(source, collective, global_batch_size=12, steps=2)  # XLA compiles micro-batches of one size
    steps = []
    for jit_compile in (model == "dropout", True):
        keras.utils.clear_session()
        step = create_step(
            collective, create, OPTIMIZERS["momentum"], batches.element_spec, precision=precision, accumulate=2,
            jit_compile=jit_compile,
        )  # fmt: skip
        assert (step.compiled is not None) == jit_compile
        reports = train(step, batches)
        assert all(report.is_finite for report in reports)
        steps.append([variable.numpy() for variable in step.variables])
    tolerance = {"float64": 1e-12, "mixed_float16": 2e-2, "mixed_bfloat16": 5e-2}[precision]
    for plain, compiled in zip(*steps, strict=True):
        assert_close(compiled, plain, "with XLA", tolerance)


class CallsPython(keras.layers.Layer):
    """What XLA cannot compile."""

    def call(self, inputs: Any) -> Any:
        return tf.ensure_shape(tf.py_function(lambda values: 2 * values, [inputs], inputs.dtype), inputs.shape)


def python_model() -> keras.Model:
    return keras.Sequential(
        [keras.Input((NUM_FEATURES,)), keras.layers.Dense(4), CallsPython(name="mine"), keras.layers.Dense(NUM_CLASSES)]
    )


@on_ranks(2)
def test_uncompilable_operations_are_named_before_the_first_step(collective: Collective) -> None:
    config = Config(steps=1, batch_size=4, precision="float64", jit_compile="true")
    with pytest.raises(UsageError, match=r"jit_compile is true, but XLA has no .* EagerPyFunc \(.*mine.*\)\. Leave"):
        create_job(Classification(python_model), config, collective, num_threads=1)


class OfAnyLength(Classification):
    """Sentences, of which no shape tells how long they are."""

    def create_sources(self, data_dir: Any, *, synthetic: bool) -> Sources:
        return Sources(word_samples(46))

    def augment(self, x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return x[:, : 3 + tf.reduce_sum(y) % 2], y


@pytest.mark.parametrize("calls_python", [True, False])
@on_ranks(1)
def test_python_code_is_named_with_unknown_lengths_too(collective: Collective, calls_python: bool) -> None:
    def create() -> keras.Model:
        layers = keras.layers
        words = [keras.Input((None,), dtype="int64"), layers.Embedding(NUM_WORDS, 3), layers.GlobalAveragePooling1D()]
        more = [CallsPython(name="mine")] if calls_python else []
        return keras.Sequential([*words, *more, layers.Dense(NUM_CLASSES)])

    config = Config(steps=2, batch_size=2, precision="float64", jit_compile="true")
    refused = pytest.raises(
        UsageError, match=r"jit_compile is true, but XLA has no way to compile \S*mine\S*, .*\. Leave"
    )
    with refused if calls_python else contextlib.nullcontext():
        job = create_job(OfAnyLength(create), config, collective, num_threads=1)
        assert job.step.compiled is not None
        assert job.step.compiled.function.has_unknown_lengths


def test_a_trial_within_a_function_keeps_keras_dtype_policy() -> None:
    """As a ``fit`` tries it."""
    seen = []

    def compute(values: tf.Tensor) -> tf.Tensor:
        seen.append(keras.config.dtype_policy().name)
        return values

    function, before = CompiledFunction(compute), keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        tf.function(function.why_not).get_concrete_function(tf.zeros([2]))
    finally:
        keras.config.set_dtype_policy(before)
    assert set(seen) == {"mixed_float16"}


@on_ranks(2)
def test_auto_continues_uncompiled(collective: Collective) -> None:
    """As on GPUs, where it is on."""
    batches = batches_of(dense_samples(46), collective, global_batch_size=GLOBAL_BATCH_SIZE, steps=2)
    step = create_step(collective, python_model, OPTIMIZERS["momentum"], batches.element_spec, jit_compile=True)
    assert step.compiled is None
    assert "EagerPyFunc" in step.not_compiled
    train(step, batches)


@on_ranks(2)
def test_a_model_with_collectives_is_not_compiled(collective: Collective) -> None:
    lines: list[str] = []

    def create() -> keras.Model:
        norm = ringtrain.SyncBatchNormalization()
        return keras.Sequential([keras.Input((NUM_FEATURES,)), norm, keras.layers.Dense(NUM_CLASSES)])

    config = Config(steps=1, batch_size=4, precision="float64", jit_compile="true")
    with show_log(lines.append):
        job = create_job(Classification(create), config, collective, num_threads=1)
    assert job.step.compiled is None
    assert "XLA compiles no part of the step: a layer asks the other ranks within its forward pass." in lines


@on_ranks(2)
def test_in_single_precision_a_step_differs_by_rounding_alone(collective: Collective) -> None:
    batches = batches_of(dense_samples(46, "float32"), collective, global_batch_size=GLOBAL_BATCH_SIZE, steps=1)
    trained = []
    for jit_compile in (False, True):
        keras.utils.clear_session()
        step = create_step(
            collective, regularised_model, OPTIMIZERS["momentum"], batches.element_spec, precision="float32",
            jit_compile=jit_compile,
        )  # fmt: skip
        train(step, batches)
        trained.append([variable.numpy() for variable in step.model.trainable_variables])
    for plain, compiled in zip(*trained, strict=True):
        assert_close(compiled, plain, "with XLA", 1e-5)


@pytest.mark.parametrize(
    ("asked", "num_gpus", "compiles"), [("auto", 1, True), ("auto", 0, False), ("true", 0, True), ("false", 1, False)]
)
def test_by_default_it_compiles_on_gpus(asked: Any, num_gpus: int, compiles: bool) -> None:
    world = World(rank=0, size=1, local_rank=0, local_size=1, node="", launcher="none")
    model, order = regularised_model(), SampleOrder(num_samples=4, global_batch_size=2, seed=0)
    with (
        mock.patch.object(tf.config, "get_visible_devices", return_value=num_gpus * ["GPU"]),
        mock.patch.object(creation, "TrainStep") as step,
    ):
        creation.create_step(
            Classification(regularised_model), Config(jit_compile=asked), Solo(world), model, keras.optimizers.SGD(),
            mock.Mock(), order,
        )  # fmt: skip
    assert step.call_args.kwargs["jit_compile"] is compiles


@on_ranks(1)
def test_batches_of_other_sizes_are_traced_once(collective: Collective) -> None:
    """A loop within the function would be traced anew for each; XLA itself compiles each size once."""
    sizes = (4, 3, 2, 3, 4, 2)
    batches = [
        make_batch(np.ones((size, NUM_FEATURES)), np.zeros(size, np.int64), step=number, global_count=size)
        for number, size in enumerate(sizes)
    ]
    step = create_step(
        collective, regularised_model, OPTIMIZERS["momentum"], spec_of(batches[0]), local_batch_size=4, jit_compile=True
    )
    counts = []
    for batch in batches:
        step(batch, 0.1)
        assert step.compiled is not None
        functions = step._train_any, step.compiled.function._function
        counts.append([function.experimental_get_tracing_count() for function in functions])
    assert counts == [[0, 1], *5 * [[1, 2]]]


def test_a_run_reports_that_it_compiles(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    small = f"{REPOSITORY / 'tests/world/workloads/small.py'}:Small"
    compiled = ["--jit_compile", "true", "--shard_optimizer", "true"]
    finished = run_ringtrain(["--workload", small, "--steps", "3", *compiled, "--out", str(tmp_path / "run")])
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert "XLA compiles each rank's forward and backward pass; sums and update are not compiled." in finished.stdout
    assert "warning: --shard_optimizer has no effect: a single rank updates all weights." in finished.stdout
    start = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert start["jit_compile"] is True
