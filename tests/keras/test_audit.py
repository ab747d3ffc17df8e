"""The audit of a script's steps: planted mistakes are named by their cause, and right scripts pass."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import horovod.tensorflow
import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain
import ringtrain.keras as hvd
from ringtrain.collectives import Collective
from ringtrain.errors import ReplicasDifferError, UsageError
from ringtrain.keras.auditing.session import Audit, Auditor, watching
from tests.world.group import on_ranks
from tests.world.processes import clean_environment, run_command

FEATURES, CLASSES, SAMPLES, BATCHES = 8, 4, 12, 4
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Script(NamedTuple):
    """What a script does otherwise than a right one."""

    samples: Callable[[], int] = lambda: SAMPLES
    seed: Callable[[], int] = lambda: 10 + hvd.rank()
    layers: Callable[[], list[keras.layers.Layer]] = list
    first_layers: Callable[[], list[keras.layers.Layer]] = list
    loss: Callable[[Any, Any], Any] = CROSS_ENTROPY
    optimizer: Callable[[], Any] = lambda: hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    broadcasts: bool = True
    model: type[keras.Model] = keras.Model
    weights: bool = False  # of samples
    change: Callable[[Any, Any], None] = lambda x, y: None  # of the samples


class Second(keras.Model):
    """Has an optimizer of its own for the last layer, without a wrapper."""

    def train_step(self, data: Any) -> Any:
        if not hasattr(self, "second"):
            self.second = keras.optimizers.SGD(0.01)
        x, y = data
        last = self.layers[-1].trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        first = [v for v in self.trainable_variables if not any(v is each for each in last)]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, [v.value for v in first]), first, strict=True))
        self.second.apply_gradients(zip(tape.gradient(loss, [v.value for v in last]), last, strict=True))
        return {"loss": loss}


class ByRank(keras.Model):
    """Changes gradients by rank: before or after their reduction, or the weights."""

    way = ""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = [v.value for v in self.trainable_variables]
        if self.way == "part":  # the first kernel is left out
            [own] = tape.gradient(loss, variables[:1])
            gradients = [own, *hvd.DistributedGradientTape(tape).gradient(loss, variables[1:])]
        elif self.way == "operation":
            gradients = hvd.grouped_allreduce(tape.gradient(loss, variables))
        elif self.way == "clips":
            gradients = [tf.clip_by_norm(g, 0.01) for g in tape.gradient(loss, variables)]
        elif self.way == "clips all":
            gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.01)
        else:
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
        if self.way == "clips reduced":
            gradients, _ = tf.clip_by_global_norm(gradients, 0.01)
        if self.way == "after":
            gradients = [g * (1.0 + hvd.rank()) for g in gradients]
        if self.way == "twice":
            gradients = [g / hvd.size() for g in gradients]
        if self.way == "rates":
            self.optimizer.learning_rate = 0.1 * (1 + hvd.rank())
        if self.way != "skips" or hvd.rank() == 0:
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        if self.way == "weights":
            self.trainable_variables[0].assign(self.trainable_variables[0] * (1 + 0.1 * hvd.rank()))
        return {"loss": loss}


def by_rank(way: str) -> type[keras.Model]:
    return type(way.capitalize(), (ByRank,), {"way": way})


class Once(ByRank):
    """Is right."""


class Noise(keras.layers.Layer):
    """Draws without a seed generator."""

    def call(self, x: Any) -> Any:
        return x * tf.random.uniform([], 0.5, 1.5)


class Sampling(keras.layers.Layer):
    """Draws by a seed generator, also outside of training."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x: Any) -> Any:
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seed_generator)


class Words(keras.layers.Layer):
    """Adds the mean of embeddings, of which a batch uses each several times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(8, 16)

    def call(self, x: Any) -> Any:
        ids = tf.cast(tf.abs(x) * 8, tf.int32) % 8
        return x + tf.reduce_mean(self.embedding(ids), axis=1)


class Attention(keras.layers.Layer):
    """The gradient of the keys' bias is rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 4)

    def call(self, x: Any) -> Any:
        return keras.ops.reshape(self.attention(x, x), (-1, 16))


def weighted_by_counts(y: Any, z: Any) -> Any:
    count = tf.cast(tf.shape(z)[0], tf.float32)
    total = horovod.tensorflow.allreduce(count, op=hvd.Sum, name="count")
    return CROSS_ENTROPY(y, z) * count * hvd.size() / total


def weighted_by_our_counts(y: Any, z: Any) -> Any:
    """As ``weighted_by_counts``, by ringtrain's operations."""
    count = tf.cast(tf.shape(z)[0], tf.float32)
    [total] = hvd.grouped_allreduce([count], op=hvd.Sum)
    means = hvd.allgather(count[tf.newaxis])
    return CROSS_ENTROPY(y, z) * count * hvd.size() / (total + 0 * tf.reduce_sum(means))


def eager_alone(y: Any, z: Any) -> Any:
    """Is right, and needs values."""
    loss = CROSS_ENTROPY(y, z)
    return loss if float(loss) > 0 else 2 * loss


def across_ranks(y: Any, z: Any) -> Any:
    return CROSS_ENTROPY(y, z) + 0.1 * tf.math.reduce_variance(ringtrain.all_gather(z))


def distribute(**arguments: Any) -> Callable[[], Any]:
    return lambda: hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), **arguments)


def clipped_mean(y: Any, z: Any) -> Any:
    """Clip the mean over the samples; that of rank 0 alone is larger."""
    loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, z, from_logits=True))
    return tf.clip_by_value(loss, 0.0, 1.65)


def clipped_samples(y: Any, z: Any) -> Any:
    """Clip the loss of each sample."""
    losses = keras.losses.sparse_categorical_crossentropy(y, z, from_logits=True)
    return tf.clip_by_value(losses, 0.0, 1.4)


def plain_sgd() -> Any:
    return keras.optimizers.SGD(0.1)


def fewer_on_rank_1() -> int:
    return SAMPLES if hvd.rank() == 0 else SAMPLES // 2


WRONG: dict[str, tuple[str, Script]] = {
    "the same data": ("same samples", Script(seed=lambda: 10, layers=lambda: [keras.layers.Dropout(0.5)])),
    "uneven batches": ("uneven batches", Script(samples=fewer_on_rank_1)),
    "op=Sum": ("summed", Script(optimizer=distribute(op=hvd.Sum))),
    "a loss divided by the ranks": ("divided twice", Script(loss=lambda y, z: CROSS_ENTROPY(y, z) / hvd.size())),
    "gradients divided by the ranks": ("divided twice", Script(optimizer=plain_sgd, model=by_rank("twice"))),
    "no broadcast": ("different weights", Script(broadcasts=False)),
    "weights changed by rank": ("different weights", Script(optimizer=plain_sgd, model=by_rank("weights"))),
    "a variable left out": ("not reduced", Script(optimizer=plain_sgd, model=by_rank("part"))),
    "another rate on each rank": ("different rates", Script(optimizer=plain_sgd, model=by_rank("rates"))),
    "updates on rank 0 alone": ("updates on some ranks", Script(optimizer=plain_sgd, model=by_rank("skips"))),
    "a second optimizer": ("optimizer not distributed", Script(model=Second)),
    "gradients changed by rank": (
        "different gradients",
        Script(optimizer=plain_sgd, model=by_rank("after")),
    ),
    "BatchNorm and dropout": (
        "local BatchNorm",
        Script(layers=lambda: [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]),
    ),
    "accumulated gradients of uneven batches": (
        "uneven batches",
        Script(samples=fewer_on_rank_1, optimizer=distribute(backward_passes_per_step=2)),
    ),
    "accumulated gradients that are not averaged": (
        "summed",
        Script(optimizer=distribute(backward_passes_per_step=2, op=hvd.Sum)),
    ),
    "uneven batches, reduced by an operation": (
        "uneven batches",
        Script(samples=fewer_on_rank_1, optimizer=plain_sgd, model=by_rank("operation")),
    ),
    "gradients clipped by their norm": (
        "clipped before the reduction",
        Script(model=by_rank("clips")),
    ),
    "gradients clipped by their global norm": (
        "clipped before the reduction",
        Script(model=by_rank("clips all")),
    ),
    "a clipped loss": ("clipped before the reduction", Script(loss=clipped_mean)),
    "a step that needs values": ("fails in a graph", Script(loss=eager_alone)),
    "a contrastive loss": (
        "loss across samples",
        Script(loss=lambda y, z: CROSS_ENTROPY(y, z) + 0.1 * tf.math.reduce_variance(z)),
    ),
    "a loss divided by its largest": (
        "loss across samples",
        Script(loss=lambda y, z: CROSS_ENTROPY(y, z / tf.reduce_max(tf.abs(z)))),
    ),
    "a loss divided by a sum of weights": (
        "loss across samples",
        Script(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
               weights=True),
    ),
}  # fmt: skip
# Found by the same code as others.
SAME_AS_OTHERS = ("accumulated gradients that are not averaged", "a loss divided by its largest")
RIGHT: dict[str, Script] = {
    "plain": Script(),
    "SGD": Script(optimizer=lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size(), momentum=0.9))),
    "dropout": Script(layers=lambda: [keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.1)]),
    "SyncBatchNormalization and dropout": Script(
        layers=lambda: [hvd.SyncBatchNormalization(), keras.layers.Dropout(0.5)]
    ),
    "fp16": Script(optimizer=distribute(compression=hvd.Compression.fp16)),
    "sums of a divided loss": Script(
        loss=lambda y, z: CROSS_ENTROPY(y, z) / hvd.size(), optimizer=distribute(op=hvd.Sum)
    ),
    "predivided in groups": Script(optimizer=distribute(gradient_predivide_factor=2.0, groups=2)),
    "a tape": Script(optimizer=plain_sgd, model=Once),
    "accumulated": Script(optimizer=distribute(backward_passes_per_step=2), layers=lambda: [keras.layers.Dropout(0.5)]),
    "clipped, with sample weights": Script(
        optimizer=lambda: hvd.DistributedOptimizer(keras.optimizers.Adam(0.01, global_clipnorm=0.1)), weights=True
    ),
    "updates that rounding decides": Script(layers=lambda: [keras.layers.Reshape((4, 4)), Attention()]),
    "repeated rows of an embedding": Script(layers=lambda: [Words()]),
    "repeated rows, clipped, by a tape": Script(
        layers=lambda: [Words()], optimizer=lambda: keras.optimizers.Adagrad(0.1, clipnorm=0.01), model=Once
    ),
    "uneven batches, weighted": Script(samples=fewer_on_rank_1, loss=weighted_by_counts),
    "uneven batches, weighted by ringtrain's operations": Script(samples=fewer_on_rank_1, loss=weighted_by_our_counts),
    "a loss across samples of all ranks": Script(loss=across_ranks),
    "gradients reduced by an operation": Script(
        optimizer=plain_sgd, model=by_rank("operation"), layers=lambda: [Words()]
    ),
    "a loss clipped by sample": Script(loss=clipped_samples),
    "reduced gradients that are clipped": Script(optimizer=plain_sgd, model=by_rank("clips reduced")),
    "loss scale": Script(
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    ),
}


def fit(script: Script, audit: Auditor | None, *, batches: int = BATCHES) -> keras.Model:
    """With no more ``batches`` than are audited, no step is traced."""
    hvd.init()
    keras.utils.set_random_seed(5 if script.broadcasts else 5 + hvd.rank())
    random = np.random.default_rng(script.seed())
    samples = script.samples()
    x = random.normal(size=(samples * batches, FEATURES)).astype(np.float32)
    y = (np.abs(x).sum(axis=1) * 3 % CLASSES).astype(np.int32)
    script.change(x, y)
    inputs = values = keras.Input((FEATURES,))
    middle = [keras.layers.Dense(16, activation="tanh"), *script.layers(), keras.layers.Dense(CLASSES)]
    for layer in [*script.first_layers(), *middle]:
        values = layer(values)
    model = script.model(inputs, values)
    model.compile(script.optimizer(), script.loss, jit_compile=False)
    callbacks: list[Any] = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if script.broadcasts else []
    callbacks += [attach(audit)] if audit else []
    weights = random.uniform(0.5, 2.0, size=len(x)).astype(np.float32) if script.weights else None
    model.fit(x, y, batch_size=samples, sample_weight=weights, shuffle=False, verbose=0, callbacks=callbacks)
    return model


def attach(auditor: Auditor) -> Audit:
    callback = Audit()
    callback.auditor = auditor
    return callback


def names(audit: Auditor) -> list[str]:
    return [cause.name for cause in audit.find_causes() if cause.is_wrong]


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[pytest.mark.slow] * (name in SAME_AS_OTHERS)) for name in WRONG]
)
@on_ranks(2)
def test_a_mistake_is_named_by_its_cause(collective: Collective, mistake: str) -> None:
    cause, script = WRONG[mistake]
    audit = Auditor(1, 1)
    with pytest.raises(ReplicasDifferError, match=cause):
        fit(script, audit)
    assert names(audit)[:1] == [cause]
    assert not audit.passes


@pytest.mark.parametrize("name", RIGHT)
@on_ranks(2)
def test_a_right_script_passes(collective: Collective, name: str) -> None:
    audit = Auditor(1, 1)
    fit(RIGHT[name], audit, batches=4 if name == "accumulated" else 2)
    assert len(audit.results) == 1
    assert audit.passes
    assert names(audit) == []
    assert bool(audit.results[0][0]["state"]) == ("SyncBatchNormalization" in name)


@on_ranks(2)
def test_the_training_goes_on_as_without_an_audit(collective: Collective) -> None:
    """Audited steps run eagerly, which rounds otherwise."""
    plain, audited = (fit(Script(), audit) for audit in (None, Auditor(2, 1)))
    for before, after in zip(plain.variables, audited.variables, strict=True):
        np.testing.assert_allclose(after.numpy(), before.numpy(), rtol=2e-5, atol=2e-6)
    assert not audited.run_eagerly
    assert not tf.config.functions_run_eagerly()


def make_loop(op: Any) -> Callable[[], None]:
    random = np.random.default_rng(20 + hvd.rank())
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def train_step(x: tf.Tensor, y: tf.Tensor, is_first: bool) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = CROSS_ENTROPY(y, model(x, training=True))
        variables = [v.value for v in model.trainable_variables]
        gradients = hvd.DistributedGradientTape(tape, op=op).gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def loop() -> None:
        for step in range(4):
            x = random.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
            train_step(x, (np.abs(x).sum(axis=1) * 3 % CLASSES).astype(np.int64), step == 0)
            if step == 0:
                hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)

    return loop


@pytest.mark.parametrize("op", ["Average", "Sum"])
@on_ranks(2)
def test_a_loop_of_a_script_is_audited(collective: Collective, op: str) -> None:
    hvd.init()
    loop = make_loop(getattr(hvd, op))
    if op == "Average":
        with hvd.audit(steps=2):
            loop()
    else:
        with pytest.raises(ReplicasDifferError, match="summed"), hvd.audit(steps=2):
            loop()


@on_ranks(2)
def test_a_loop_that_runs_eagerly_only_is_named(collective: Collective) -> None:
    """Its graph has no values; the first call of the function would fail without the audit."""
    hvd.init()
    layer, optimizer = keras.layers.Dense(CLASSES), keras.optimizers.SGD(0.1)
    layer.build((None, FEATURES))

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(x)))
        variables = [v.value for v in layer.trainable_variables]
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
        hvd.broadcast_object(0)
        return loss

    x = tf.constant(np.random.default_rng(hvd.rank()).normal(size=(SAMPLES, FEATURES)), tf.float32)
    hvd.broadcast_variables(layer.variables, root_rank=0)

    def loop() -> None:
        for _ in range(2):
            step(x)

    with pytest.raises(ReplicasDifferError, match="fails in a graph"), hvd.audit(steps=1):
        loop()
    with pytest.raises(UsageError, match="sends Python objects"):
        step(x)


@on_ranks(2)
def test_fit_within_the_block_is_audited(collective: Collective) -> None:
    hvd.init()
    with hvd.audit(steps=1):
        model = fit(Script(), None, batches=2)
    assert not model.run_eagerly
    with pytest.raises(ReplicasDifferError, match="same samples"), hvd.audit(steps=1):
        fit(WRONG["the same data"][1], None)


@on_ranks(2)
def test_a_rank_that_leaves_the_loop_ends_the_audit(collective: Collective) -> None:
    hvd.init()
    random, layer = np.random.default_rng(hvd.rank()), keras.layers.Dense(CLASSES)
    layer.build((None, FEATURES))
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def step(x: tf.Tensor, is_left: bool) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(x) - 1.0))
        if not (is_left or auditor.why_not):  # else it would wait for rank 1
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, [v.value for v in layer.trainable_variables])
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))

    auditor = Auditor(4, 1)
    with watching(auditor):
        for number in range(2 if hvd.rank() == 1 else 4):
            step(tf.constant(random.normal(size=(SAMPLES, FEATURES)), tf.float32), bool(auditor.why_not))
            if number == 0:
                hvd.broadcast_variables([*layer.variables, *optimizer.variables], root_rank=0)
    assert (len(auditor.results), auditor.passes) == (1, True)
    assert hvd.rank() == 1 or auditor.why_not == "the script stopped training on rank 1"


@on_ranks(2)
def test_functions_that_do_not_train_are_left_alone(collective: Collective) -> None:
    """Two that rank 0 alone calls, and the steps of two optimizers, each audited by itself, with layers of no model."""
    hvd.init()
    random = np.random.default_rng(20 + hvd.rank())
    layers = [keras.layers.Dense(CLASSES), keras.layers.Dense(CLASSES)]
    for layer in layers:
        layer.build((None, FEATURES))
    optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02)]
    mean, dropout = keras.metrics.Mean(), keras.layers.Dropout(0.5)

    def make_step(layer: keras.layers.Layer, optimizer: Any) -> Any:
        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(layer(dropout(x, training=True)) - 1.0))
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, [v.value for v in layer.trainable_variables])
            optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
            mean.update_state(loss)
            return loss

        return step

    steps = [make_step(*pair) for pair in zip(layers, optimizers, strict=True)]
    evaluate = tf.function(lambda x: tf.reduce_sum(layers[0](x)))
    probe, of_probe = keras.layers.Dense(1), keras.optimizers.SGD(0.1)
    probe.build((None, FEATURES))

    @tf.function
    def train_probe(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(probe(x)))
        gradients = tape.gradient(loss, [v.value for v in probe.trainable_variables])
        of_probe.apply_gradients(zip(gradients, probe.trainable_variables, strict=True))

    auditor = Auditor(4, 1)
    with watching(auditor):
        for number in range(4):
            x = tf.constant(random.normal(size=(SAMPLES, FEATURES)), tf.float32)
            for step in steps:
                step(x)
            if number == 0:
                hvd.broadcast_variables([v for each in (*layers, *optimizers) for v in each.variables], root_rank=0)
            if hvd.rank() == 0:
                evaluate(x)
                train_probe(x)
    assert (len(auditor.results), auditor.passes, auditor.why_not) == (4, True, "")
    assert [int(optimizer.iterations) for optimizer in optimizers] == [4, 4]
    assert float(mean.count) == 8


@on_ranks(2)
def test_what_cannot_be_audited_is_said(collective: Collective) -> None:
    hvd.init()
    for script, words in (
        (Script(optimizer=distribute(op=hvd.Adasum)), "no counterpart in one process"),
        (Script(layers=lambda: [Noise()]), "draws random numbers outside"),
        (Script(layers=lambda: [Sampling()]), "draws random numbers outside"),
    ):
        audit = Auditor(1, 1)
        fit(script, audit, batches=2)
        assert words in audit.why_not
        assert "nothing was compared" in audit.describe()[0]
    fit(Script(optimizer=distribute(backward_passes_per_step=4)), audit := Auditor(1, 1))
    assert "no repeated step" in audit.describe()[0]  # four steps reduce once
    with pytest.raises(UsageError, match="steps is 0"):
        hvd.callbacks.Audit(steps=0)
    audit = Auditor(1, 1)
    with watching(audit):
        tf.function(lambda x: x + 1)(tf.ones([2]))
    assert audit.results == []


def nan_on_rank_1(sample: int) -> Callable[[Any, Any], None]:
    def change(x: Any, y: Any) -> None:
        if hvd.rank() == 1:
            x[sample, 2] = np.nan

    return change


class Masked(keras.layers.Layer):
    """Takes NaN for zero, and adds a constant mask with infinite values."""

    def build(self, shape: Any) -> None:
        self.mask = self.add_weight(
            shape=(shape[-1],), initializer=lambda shape, dtype: tf.fill(shape, -np.inf), trainable=False
        )

    def call(self, x: Any) -> Any:
        x = tf.where(tf.math.is_nan(x), tf.zeros_like(x), x)
        return tf.maximum(x, self.mask)


def zero_on_rank_1(x: Any, y: Any) -> None:
    if hvd.rank() == 1:
        x[SAMPLES + 3, 2] = 0.0


class Logarithm(keras.layers.Layer):
    """Is not finite for a zero."""

    def call(self, x: Any) -> Any:
        return tf.math.log(tf.abs(x))


class OfWhole(keras.layers.Layer):
    """Is not finite for the samples of all ranks."""

    def call(self, x: Any) -> Any:
        return x * tf.where(tf.shape(x)[0] > SAMPLES, np.inf, 1.0)


class Wrong(keras.layers.Layer):
    """Has a weight that is infinite on rank 1 only."""

    def build(self, shape: Any) -> None:
        first = np.inf if hvd.rank() == 1 else 1.0
        self.scale = self.add_weight(shape=(), initializer=lambda shape, dtype: tf.constant(first), name="scale")

    def call(self, x: Any) -> Any:
        return x * self.scale


NONFINITE: dict[str, tuple[Script, str]] = {
    "a sample of the step": (
        Script(change=nan_on_rank_1(SAMPLES + 3)),
        r"on rank 1 the batch is not finite .* 1 of 96 values of x, float32 \[12, 8\], the first in its sample 3",
    ),
    "a sample of the first step": (
        Script(change=nan_on_rank_1(5)),
        r"on rank 1 an earlier batch was not finite .* 1 of 96 values of x, .* in its sample 5",
    ),
    "weights": (
        Script(layers=lambda: [Wrong()], broadcasts=False),
        r"on rank 0 .* is not finite \(NaN or infinite\) before the step, although all batches were",
    ),
    "the model": (
        Script(change=zero_on_rank_1, first_layers=lambda: [Logarithm()]),
        r"on rank 1 the gradient of dense\w*/kernel.* is not finite .*, although batch and weights are",
    ),
    "the whole batch": (
        Script(layers=lambda: [OfWhole()]),
        "is not finite .* in one process with the samples of all ranks, and finite on each rank",
    ),
    "samples, with a loss scale": (
        Script(
            change=lambda x, y: x.fill(np.nan),
            optimizer=lambda: keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))),
        ),
        "on rank 0 the batch is not finite .* 96 of 96 values of x",
    ),
}


@pytest.mark.parametrize("kind", NONFINITE)
@on_ranks(2)
def test_values_that_are_not_finite_are_no_other_cause(collective: Collective, kind: str) -> None:
    """They differ from themselves, which looked like random numbers."""
    script, words = NONFINITE[kind]
    fit(script, audit := Auditor(1, 1), batches=2)
    assert re.search(words, audit.why_not), audit.why_not
    assert audit.results == []


@on_ranks(2)
def test_a_model_may_mask_values_that_are_not_finite(collective: Collective) -> None:
    script = Script(change=nan_on_rank_1(SAMPLES + 3), first_layers=lambda: [Masked()])
    fit(script, audit := Auditor(1, 1), batches=2)
    assert (audit.why_not, audit.passes) == ("", True)


@on_ranks(2)
def test_a_script_that_trains_fewer_steps_is_audited_to_its_end(collective: Collective) -> None:
    audit = Auditor(2 * BATCHES, 1)
    fit(Script(), audit, batches=3)
    assert (len(audit.results), audit.passes) == (2, True)
    assert f"ended before {2 * BATCHES} steps" in "".join(audit.describe())


@on_ranks(2)
def test_ranks_that_would_wait_for_each_other_are_refused(collective: Collective) -> None:
    """One with an audit for one without, and one whose data have not ended for one whose data have."""
    hvd.init()
    with pytest.raises(UsageError, match=r"different callbacks\.Audit"):
        fit(Script(), Auditor(1, 1) if hvd.rank() == 0 else None)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), CROSS_ENTROPY)
    data = tf.data.Dataset.from_tensors((tf.ones([4, FEATURES]), tf.zeros([4], tf.int64))).filter(lambda x, y: True)
    with pytest.raises(UsageError, match="steps of an epoch are unknown"):
        model.fit(data, verbose=0, callbacks=[hvd.callbacks.Audit()])


@on_ranks(2)
def test_a_logged_loss_of_other_samples_is_a_note(collective: Collective) -> None:
    """The loss is divided by the ranks, and gradients are summed."""
    fit(RIGHT["sums of a divided loss"], audit := Auditor(1, 1), batches=2)
    assert [cause.name for cause in audit.find_causes()] == ["logged loss"]
    fit(Script(), audit := Auditor(1, 1), batches=2)
    assert audit.find_causes() == []


@on_ranks(1)
def test_one_rank_and_elastic_runs_are_refused(collective: Collective) -> None:
    hvd.init()
    with pytest.raises(UsageError, match="the only one"), hvd.audit():
        pass
    with pytest.raises(UsageError, match="the only one"):
        fit(Script(), Auditor(1, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_ELASTIC", "1")
        patch.setattr(horovod.tensorflow, "size", lambda: 2)
        with pytest.raises(UsageError, match="does not support elastic runs"), hvd.audit():
            pass


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


SCRIPT = """
import sys
import keras, numpy as np
import ringtrain.keras as hvd

hvd.init()
random = np.random.default_rng(hvd.rank() if "--shard" in sys.argv else 0)
x = random.normal(size=(64, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
if "--untrained" not in sys.argv:
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, x.sum(axis=1), batch_size=8, epochs=100, shuffle=False, verbose=0, callbacks=[first])
    print("trained to its end")
"""


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        (["--shard"], 0, "the ranks train what one process would train"),
        ([], 5, "cause: Ranks train on the same samples: 100%"),
        (["--untrained"], 2, "no step that updates weights was called twice"),
    ],
)
def test_the_command_audits_a_script(script: Path, words: list[str], code: int, shown: str, tmp_path: Path) -> None:
    out = tmp_path / "audit"
    command = [sys.executable, "-m", "ringtrain", "verify", "--script", str(script), "-np", "2", "--steps", "2"]
    run = run_command([*command, "--out", str(out), "--", *words], env=clean_environment(), timeout=120)
    assert (run.rc, run.left_behind) == (code, False), run.stderr
    assert shown in run.stdout + run.stderr
    assert "trained to its end" not in run.stdout
    if code != 2:
        assert json.loads((out / "verdict.json").read_text())["passes"] == (code == 0)
        assert "dense/kernel" in (out / "index.html").read_text()


FAILURES = {
    "raise ValueError('mine')": (1, r"exit code 1; rank \d: ValueError: mine \(.*train\.py:\d+\)\.\n"),
    "sys.exit(7)": (1, r"exit code 7; rank \d: SystemExit: 7.*\.\n"),
    "sys.exit('no data')": (1, r"exit code 1; rank \d: SystemExit: no data.*\.\n"),
    "import os; os._exit(9)": (1, r"exit code 9; it raised no exception: a process was killed"),
}


@pytest.mark.parametrize("statement", FAILURES)
def test_the_last_line_names_why_the_script_failed(script: Path, statement: str, tmp_path: Path) -> None:
    script.write_text(f"{SCRIPT}\n{statement}\n".replace("    model.fit", "    0 and model.fit"))
    out = tmp_path / "audit"
    run = run_command(
        [sys.executable, "-m", "ringtrain", "verify", "--script", str(script), "--out", str(out)],
        env=clean_environment(),
        timeout=120,
    )
    code, words = FAILURES[statement]
    assert (run.rc, run.left_behind) == (code, False), run.stderr
    last = run.stderr[run.stderr.rindex("ringtrain: error: the script failed") :]
    assert re.search(words, last), last
    assert list(out.iterdir()) == []


def test_files_that_are_not_of_the_audit_are_left(script: Path, tmp_path: Path) -> None:
    """Those of an audit are replaced; ``.runs`` and others are nobody's."""
    out = tmp_path / "audit"
    (out / ".runs").mkdir(parents=True)
    (out / ".runs/mine").write_text("mine")
    command = [sys.executable, "-m", "ringtrain", "verify", "--script", str(script), "--steps", "1", "--out", str(out)]
    for _ in range(2):
        run = run_command([*command, "--", "--shard"], env=clean_environment(), timeout=120)
        assert run.rc == 0, run.stderr
    assert sorted(path.name for path in out.iterdir()) == [".runs", "index.html", "verdict.json"]
    assert (out / ".runs/mine").read_text() == "mine"


LOOP = """
import keras, numpy as np, tensorflow as tf
import ringtrain.keras as hvd

hvd.init()
random = np.random.default_rng(hvd.rank())
layer, optimizer = keras.layers.Dense(1), keras.optimizers.SGD(0.1)
layer.build((None, 4))

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(layer(x)))
    variables = [v.value for v in layer.trainable_variables]
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, layer.trainable_variables))

for number in range(3 if hvd.rank() else 9):
    step(tf.constant(random.normal(size=(8, 4)), tf.float32))
    if number == 0:
        hvd.broadcast_variables([*layer.variables, *optimizer.variables], root_rank=0)
"""


def test_the_command_audits_a_loop_that_a_rank_leaves(tmp_path: Path) -> None:
    script, out = tmp_path / "loop.py", tmp_path / "audit"
    script.write_text(LOOP)
    command = [sys.executable, "-m", "ringtrain", "verify", "--script", str(script), "--steps", "5", "--out", str(out)]
    run = run_command(command, env=clean_environment(), timeout=120)
    assert (run.rc, run.left_behind) == (0, False), run.stderr
    assert "ended before 5 steps: the script stopped training on rank 1" in run.stdout
    assert json.loads((out / "verdict.json").read_text())["steps"] == 2


EXAMPLE = Path(__file__).parents[2] / "examples/fit_kept.py"


def verify_kept(directory: Path) -> Any:
    """Audit the script ``fit_kept.py`` in this directory, where it keeps its run in runs/kept."""
    command = [sys.executable, "-m", "ringtrain", "verify", "--script", "fit_kept.py", "--steps", "1"]
    run = run_command(command, env=clean_environment(), timeout=120, cwd=directory)
    assert (run.rc, run.left_behind) == (0, False), run.stderr
    assert "the ranks train what one process would train" in run.stdout
    assert sorted(path.name for path in (directory / "audit").iterdir()) == ["index.html", "verdict.json"]
    return run


def read_files(directory: Path) -> dict[Path, tuple[int, bytes]]:
    """Return time of change and content of each file."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_script_with_a_run_directory_is_audited_without_writing_to_it(tmp_path: Path) -> None:
    (tmp_path / "fit_kept.py").write_text(EXAMPLE.read_text())
    run = verify_kept(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit", "fit_kept.py"]
    assert "note" not in run.stdout


def test_the_audit_says_that_the_run_of_a_script_is_complete_already(tmp_path: Path) -> None:
    script = tmp_path / "fit_kept.py"
    script.write_text(EXAMPLE.read_text().replace("epochs=10", "epochs=1"))
    trained = run_command([sys.executable, str(script)], env=clean_environment(), timeout=120, cwd=tmp_path)
    assert trained.rc == 0, trained.stderr
    before = read_files(tmp_path / "runs")
    run = verify_kept(tmp_path)
    assert "note: The run in runs/kept is complete already (128 steps)" in run.stdout
    assert read_files(tmp_path / "runs") == before
    script.write_text(EXAMPLE.read_text())
    run = verify_kept(tmp_path)
    assert "note: The run in runs/kept has a checkpoint of step 128, which the script resumes" in run.stdout
    assert read_files(tmp_path / "runs") == before


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--script", "no_such_file.py"], "no_such_file.py"),
        (["--script", __file__, "-np", "1"], "np is 1"),
        (["--script", __file__, "--steps", "0"], "steps is 0"),
    ],
)
def test_the_command_refuses(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    from ringtrain.cli import main

    assert main(["verify", *words]) == 2
    assert named in capsys.readouterr().err
