"""``--jit_compile``: XLA compiles a rank's forward and backward pass, and all ranks train what one process trains."""

import contextlib
import dataclasses
import json
import re
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
from ringtrain.errors import UsageError
from ringtrain.guard.labels import Labels
from ringtrain.messages.log import show_log
from ringtrain.runtime.world import World
from ringtrain.step.compiled import CompiledFunction, StepFacts, decide_on_xla, describe_unsupported
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
    """XLA lacks this operation on all devices."""

    def call(self, inputs: Any) -> Any:
        return tf.ensure_shape(tf.py_function(lambda values: 2 * values, [inputs], inputs.dtype), inputs.shape)


class SumsSegments(keras.layers.Layer):
    """XLA lacks this operation too; it is in the body of a loop, which is another function of the graph."""

    def call(self, inputs: Any) -> Any:
        sums = tf.map_fn(lambda row: tf.math.segment_sum(row, tf.range(4)), inputs)
        return tf.ensure_shape(sums, inputs.shape)


class NeedsConstants(keras.layers.Layer):
    """XLA has this operation, for lengths that are known when it compiles."""

    def call(self, inputs: Any) -> Any:
        length = tf.cast(tf.abs(inputs[0, 0]), tf.int32)
        return inputs + tf.cast(tf.reduce_sum(tf.range(length)), inputs.dtype)


def model_with(layer: type[keras.layers.Layer]) -> keras.Model:
    return keras.Sequential(
        [keras.Input((NUM_FEATURES,)), keras.layers.Dense(4), layer(name="mine"), keras.layers.Dense(NUM_CLASSES)]
    )


UNCOMPILABLE = {"EagerPyFunc": CallsPython, "SegmentSum": SumsSegments, "Range": NeedsConstants}


@pytest.mark.parametrize("operation", UNCOMPILABLE)
@on_ranks(2)
def test_uncompilable_operations_are_named_before_the_first_step(collective: Collective, operation: str) -> None:
    config = Config(steps=1, batch_size=4, precision="float64", jit_compile="true")
    message = rf"--jit_compile true: XLA cannot compile {operation} \(node \S*mine\S*\)\. .* --jit_compile false\."
    with pytest.raises(UsageError, match=message):
        create_job(Classification(lambda: model_with(UNCOMPILABLE[operation])), config, collective, num_threads=1)


def test_an_error_without_a_known_operation_is_quoted() -> None:
    graph = tf.Graph()
    assert describe_unsupported("It failed.\nMore.", graph) == "the step (It failed)"
    assert describe_unsupported("It failed [[{{node a/b}}]]", graph) == "the operation (node a/b)"


def test_an_operation_without_a_deterministic_version_is_named(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    flags = ["--jit_compile", "true", "--deterministic", "true", "--out", str(tmp_path / "run")]
    finished = run_ringtrain(["--workload", "digits", "--steps", "3", *flags])
    assert finished.rc == 2, finished.stdout + finished.stderr
    message = r"XLA cannot compile MaxPoolGrad \(node \S*max_pooling\S*\) with --deterministic true\. "
    assert re.search(message + ".*--jit_compile false", finished.stderr)


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
        UsageError, match=r"--jit_compile true: XLA cannot compile \S*mine\S*, .* --jit_compile false\."
    )
    with refused if calls_python else contextlib.nullcontext():
        job = create_job(OfAnyLength(create), config, collective, num_threads=1)
        assert job.step.compiled is not None
        assert job.step.compiled.function.has_unknown_lengths


def test_a_check_within_a_function_keeps_keras_dtype_policy() -> None:
    """As in a ``fit``, where the number of samples is unknown, and the check traces again."""
    policies = []

    def compute(values: tf.Tensor) -> tf.Tensor:
        policies.append(keras.config.dtype_policy().name)
        return values

    function = CompiledFunction(compute)

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def step(values: tf.Tensor) -> tf.Tensor:
        result = function(values)
        assert function.find_unsupported() == ""
        return result

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        step.get_concrete_function()
    finally:
        keras.config.set_dtype_policy(before)
    assert policies == 2 * ["mixed_float16"]


def test_sparse_tensors_are_arguments_too() -> None:
    function = CompiledFunction(lambda matrix, nothing, vector: tf.sparse.to_dense(matrix) @ vector)
    matrix = tf.sparse.from_dense([[0.0, 2.0], [3.0, 0.0]])
    np.testing.assert_array_equal(function(matrix, None, tf.constant([[1.0], [5.0]])), [[10.0], [3.0]])
    assert function.has_unknown_lengths


def test_auto_refuses_what_xla_lacks() -> None:
    """As on a GPU, where it compiles."""
    world = World(rank=0, size=1, local_rank=0, local_size=1, node="", launcher="none")
    spec = spec_of(make_batch(np.ones((4, NUM_FEATURES)), np.zeros(4, np.int64), step=0, global_count=4))
    with pytest.raises(UsageError, match="--jit_compile auto: XLA cannot compile EagerPyFunc "):
        create_step(
            Solo(world), lambda: model_with(CallsPython), OPTIMIZERS["momentum"], spec, local_batch_size=4,
            jit_compile=True,
        )  # fmt: skip


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


PLAIN = StepFacts(
    has_gpu=True, is_deterministic=False, asks_other_ranks=False, has_unknown_lengths=False, unsupported_layers=[]
)
WITHOUT_GPU = dataclasses.replace(PLAIN, has_gpu=False)
NOT_BY_ITSELF = {
    "Keras does not compile the layer lookup": dataclasses.replace(PLAIN, unsupported_layers=["lookup"]),
    "the samples vary in length": dataclasses.replace(PLAIN, has_unknown_lengths=True),
    "with --deterministic true": dataclasses.replace(PLAIN, is_deterministic=True),
}


@pytest.mark.parametrize(
    ("jit_compile", "facts", "compiles"),
    [
        ("auto", PLAIN, True),
        ("auto", WITHOUT_GPU, False),
        ("true", PLAIN, True),
        ("true", WITHOUT_GPU, True),
        ("false", PLAIN, False),
        ("false", WITHOUT_GPU, False),
    ],
)
def test_by_default_it_compiles_on_gpus(jit_compile: str, facts: StepFacts, compiles: bool) -> None:
    assert decide_on_xla(jit_compile, facts) == (compiles, "")


@pytest.mark.parametrize("why_not", NOT_BY_ITSELF)
def test_auto_avoids_what_xla_is_known_to_lack(why_not: str) -> None:
    facts = NOT_BY_ITSELF[why_not]
    decision = decide_on_xla("auto", facts)
    assert not decision.compiles
    assert decision.why_not.startswith(why_not)
    assert decide_on_xla("true", facts) == (True, "")


@pytest.mark.parametrize("jit_compile", ["auto", "true"])
def test_a_layer_that_asks_other_ranks_is_never_compiled(jit_compile: str) -> None:
    decision = decide_on_xla(jit_compile, dataclasses.replace(PLAIN, asks_other_ranks=True))
    assert not decision.compiles
    assert decision.why_not.startswith("a layer asks the other ranks")


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_facts_are_known_before_the_trace(num_gpus: int) -> None:
    layers = keras.layers
    lookup = keras.Sequential([layers.StringLookup(vocabulary=["a", "b"], name="lookup")])
    norm = ringtrain.SyncBatchNormalization()
    plain = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    special = keras.Sequential([keras.Input((3,), dtype="string"), lookup, layers.Embedding(3, 2), norm])
    batch = spec_of(make_batch(np.ones((4, 3)), np.zeros(4, np.int64), step=0, global_count=4))
    of_any_length = batch._replace(x=tf.TensorSpec([None, None]))
    workload = Classification(regularised_model)
    with mock.patch.object(tf.config, "get_visible_devices", return_value=num_gpus * ["GPU"]):
        facts = creation.find_facts(workload, Config(), plain, batch)
        others = creation.find_facts(workload, Config(deterministic=True), special, of_any_length)
    assert facts == dataclasses.replace(PLAIN, has_gpu=bool(num_gpus))
    assert others == StepFacts(
        has_gpu=bool(num_gpus),
        is_deterministic=True,
        asks_other_ranks=True,
        has_unknown_lengths=True,
        unsupported_layers=["lookup"],
    )


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
