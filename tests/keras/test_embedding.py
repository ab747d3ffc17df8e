"""Repeated rows of a sparse gradient are added first, on any number of ranks, one included."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain.keras as hvd
from ringtrain.collectives import Collective
from ringtrain.step.train_step import set_precision
from tests.world.group import on_ranks
from tests.world.training import assert_same_bits_on_all_ranks

ROWS = 8
WIDTH = 3
STEPS = 3
IDS = np.array([[1, 1, 2], [1, 3, 4], [5, 5, 5], [1, 2, 6], [7, 1, 1], [2, 2, 3]])  # [samples, words]
LABELS = np.arange(6.0)[:, np.newaxis]  # [samples, 1]
K = keras.optimizers
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "Adam": lambda: K.Adam(0.05),
    "RMSprop with momentum": lambda: K.RMSprop(0.05, momentum=0.5),
    "Adagrad": lambda: K.Adagrad(0.05),
    "clipnorm": lambda: K.SGD(0.05, clipnorm=0.1),
    "clipvalue": lambda: K.SGD(0.05, clipvalue=0.1),
    "global_clipnorm": lambda: K.SGD(0.05, global_clipnorm=0.1),
    "loss scale": lambda: K.LossScaleOptimizer(K.Adam(0.05)),
}
if hasattr(K, "MultiOptimizer"):  # from Keras 3.15 on
    OPTIMIZERS["parts"] = lambda: K.MultiOptimizer(
        K.OptimizerMap(K.Adam(0.05), {".*/kernel": K.SGD(0.05)}),
    )


class OneHot(keras.layers.Layer):
    """An embedding whose gradient is dense."""

    def build(self, shape: Any) -> None:
        self.embeddings = self.add_weight(shape=(ROWS, WIDTH))

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.one_hot(ids, ROWS, dtype=self.embeddings.dtype) @ self.embeddings


def make_model(embedding: keras.layers.Layer) -> keras.Model:
    """Return a model of float64 whose weights are equal in every process."""
    inputs = keras.Input((3,), dtype="int32")
    mean = keras.layers.GlobalAveragePooling1D()(embedding(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(mean))
    for weight in model.weights:
        weight.assign(np.random.default_rng(5).normal(size=weight.shape))
    return model


def my_samples() -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's third, half or all of the samples."""
    return IDS[hvd.rank() :: hvd.size()], LABELS[hvd.rank() :: hvd.size()]


def train_in_loop(
    model: keras.Model,
    optimizer: Any,
    samples: tuple[np.ndarray, np.ndarray],
    *,
    by_tape: bool = False,
) -> None:
    """Train some steps in a graph; ``by_tape``: the tape reduces, and the optimizer is a plain one."""
    ids, labels = samples
    variables = [variable.value for variable in model.trainable_variables]

    @tf.function(autograph=False)
    def step() -> None:
        with tf.GradientTape() as tape:
            errors = tf.square(model(ids, training=True) - labels)
            loss = optimizer.scale_loss(tf.reduce_mean(errors))
        if by_tape:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, variables)
        optimizer.apply(gradients, model.trainable_variables)

    for _ in range(STEPS):
        step()


def right_weights(name: str) -> list[np.ndarray]:
    """Return the weights that plain Keras trains on all samples with dense gradients."""
    model = make_model(OneHot())
    optimizer = OPTIMIZERS[name]()
    optimizer.build(model.trainable_variables)
    variables = [variable.value for variable in model.trainable_variables]
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean(tf.square(model(IDS) - LABELS)))
        gradients = tape.gradient(loss, variables)
        assert not any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
        optimizer.apply(gradients, model.trainable_variables)
    return [weight.numpy() for weight in model.weights]


def check(model: keras.Model, name: str, collective: Collective) -> None:
    assert_same_bits_on_all_ranks(model.weights, collective)
    for weight, right in zip(model.weights, right_weights(name), strict=True):
        np.testing.assert_allclose(weight.numpy(), right, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(1, 2, 3)
def test_an_optimizer_gets_each_row_once(collective: Collective, name: str) -> None:
    hvd.init()
    set_precision("float64")
    model = make_model(keras.layers.Embedding(ROWS, WIDTH))
    train_in_loop(model, hvd.DistributedOptimizer(OPTIMIZERS[name]()), my_samples())
    check(model, name, collective)


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["graph", "XLA"])
@on_ranks(1, 2, 3)
def test_a_fit_gives_an_optimizer_each_row_once(collective: Collective, options: dict[str, Any]) -> None:
    """In this fit, sums of dense gradients may be native."""
    hvd.init()
    set_precision("float64")
    model = make_model(keras.layers.Embedding(ROWS, WIDTH))
    model.compile(hvd.DistributedOptimizer(OPTIMIZERS["Adam"]()), "mean_squared_error", **options)
    ids, labels = my_samples()
    model.fit(ids, labels, batch_size=6, epochs=STEPS, shuffle=False, verbose=0)
    check(model, "Adam", collective)


@on_ranks(1, 2, 3)
def test_a_tape_returns_each_row_once(collective: Collective) -> None:
    hvd.init()
    set_precision("float64")
    model = make_model(keras.layers.Embedding(ROWS, WIDTH))
    train_in_loop(model, OPTIMIZERS["Adam"](), my_samples(), by_tape=True)
    check(model, "Adam", collective)


@on_ranks(1, 2)
def test_a_local_layer_gets_each_row_once(collective: Collective) -> None:
    """Each rank trains on all samples, so that its own layer is that of one process."""
    hvd.init()
    set_precision("float64")
    model = make_model(keras.layers.Embedding(ROWS, WIDTH))
    optimizer = hvd.PartialDistributedOptimizer(
        OPTIMIZERS["Adam"](), local_layers=model.layers[1], scale_local_gradients=False
    )
    train_in_loop(model, optimizer, (IDS, LABELS))
    check(model, "Adam", collective)


@on_ranks(1, 2)
def test_accumulated_passes_add_repeated_rows(collective: Collective) -> None:
    """Two passes with the same samples, averaged, are one step."""
    hvd.init()
    set_precision("float64")
    model = make_model(keras.layers.Embedding(ROWS, WIDTH))
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["Adagrad"](),
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
        sparse_as_dense=True,
    )
    for _ in range(2):
        train_in_loop(model, optimizer, my_samples())
    check(model, "Adagrad", collective)
