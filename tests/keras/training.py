"""One small training, told in the three ways that Keras has, for tests that hold ranks against each other."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ringtrain.keras as hvd

STEPS = 10
FEATURES, CLASSES = 6, 3
WAYS = ("fit", "eager fit", "loop")


def make_batches(samples: int, steps: int = STEPS) -> list[tuple[np.ndarray, np.ndarray]]:
    """Global batches of (x [samples, FEATURES], y [samples, CLASSES]), the same in every process."""
    random = np.random.default_rng(7)
    batches = []
    for _ in range(steps):
        x = random.normal(size=(samples, FEATURES))
        batches.append((x, np.tanh(x[:, :CLASSES]) + 0.1 * random.normal(size=(samples, CLASSES))))
    return batches


def split_batches(
    batches: list[tuple[np.ndarray, np.ndarray]], shares: tuple[int, ...] = ()
) -> list[tuple[np.ndarray, np.ndarray]]:
    """This rank's part of each batch: an equal one, or as many samples as its entry of ``shares``."""
    samples, rank, size = len(batches[0][0]), hvd.rank(), hvd.size()
    shares = shares or (samples // size,) * size
    assert sum(shares) == samples
    start = sum(shares[:rank])
    return [(x[start : start + shares[rank]], y[start : start + shares[rank]]) for x, y in batches]


def make_model(normalization: Callable[[], keras.layers.Layer] | None = None) -> keras.Model:
    """A model of float64 with the same weights in every process; its gradients are smooth and never zero."""
    keras.utils.set_random_seed(3)
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(8, activation="tanh")]
    if normalization is not None:
        layers.append(normalization())
    return keras.Sequential([*layers, keras.layers.Dense(CLASSES)])


def train(
    way: str,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    batches: list[tuple[np.ndarray, np.ndarray]],
    *,
    loss: Any = "mean_squared_error",
    **compile_options: Any,
) -> None:
    """Train one epoch of these batches."""
    if way == "loop":
        _train_in_loop(model, optimizer, batches, keras.losses.get(loss) if not callable(loss) else loss)
        return
    model.compile(optimizer, loss, run_eagerly=way == "eager fit", **compile_options)
    model.fit(dataset(batches), epochs=1, verbose=0)


def dataset(batches: list[tuple[np.ndarray, np.ndarray]]) -> tf.data.Dataset:
    """The batches as they are, in a data set that knows their number."""
    spec = tuple(tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in batches[0])
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    return data.apply(tf.data.experimental.assert_cardinality(len(batches)))


def _train_in_loop(model: keras.Model, optimizer: Any, batches: Any, loss: Callable[[Any, Any], Any]) -> None:
    @tf.function(reduce_retracing=True, autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            value = optimizer.scale_loss(tf.reduce_mean(loss(y, model(x, training=True))))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for x, y in batches:
        step(tf.constant(x), tf.constant(y))


def largest_difference(model: keras.Model, other: keras.Model) -> float:
    """Of any variable from its counterpart, relative to the largest value of that tensor."""
    differences = []
    for mine, its in zip(model.variables, other.variables, strict=True):
        if mine.name != "seed_generator_state":
            a, b = mine.numpy(), its.numpy()
            differences.append(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-300))
    return float(max(differences))
