"""The models of the benchmark, with synthetic samples: the same for every contender, first values included."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

NUM_CLASSES = 10
WIDE_WIDTH = 2700
MANY_LAYERS, MANY_WIDTH = 150, 64
TINY_WIDTH = 256


class Model(NamedTuple):
    """A model of the benchmark."""

    create: Callable[[], Any]  # () -> keras.Model, whose outputs are logits of NUM_CLASSES
    sample_shape: tuple[int, ...]  # of one input
    num_samples: int  # of the synthetic data
    local_batch_size: int  # samples per rank
    learning_rate: float  # of plain SGD; so small that rounding does not grow into another trajectory


def make_samples(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """x [n, *sample_shape] float32 and labels [n] int64.

    A class can be learnt: it has a centre, with noise around it. From noise alone the gradients of the samples would
    cancel, and what moves the weights would be rounding as much as anything.
    """
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((NUM_CLASSES, *model.sample_shape), np.float32)
    labels = generator.integers(0, NUM_CLASSES, model.num_samples)
    noise = generator.standard_normal((model.num_samples, *model.sample_shape), np.float32)
    return centres[labels] + noise, labels


def create_cnn() -> Any:
    """The network of TensorFlow's CIFAR-10 tutorial on 24x24 crops: 1.07 M parameters in 10 tensors."""
    import keras
    import tensorflow as tf
    from keras import layers

    def normalize(images: tf.Tensor) -> tf.Tensor:
        return tf.nn.local_response_normalization(images, depth_radius=4, bias=1.0, alpha=0.001 / 9, beta=0.75)

    kernels = _kernels()
    return keras.Sequential(
        [
            keras.Input((24, 24, 3)),
            layers.Conv2D(64, 5, padding="same", activation="relu", kernel_initializer=next(kernels)),
            layers.MaxPooling2D(3, 2, padding="same"),
            layers.Lambda(normalize),
            layers.Conv2D(64, 5, padding="same", activation="relu", kernel_initializer=next(kernels)),
            layers.Lambda(normalize),
            layers.MaxPooling2D(3, 2, padding="same"),  # [n, 6, 6, 64]
            layers.Flatten(),
            layers.Dense(384, activation="relu", kernel_initializer=next(kernels)),
            layers.Dense(192, activation="relu", kernel_initializer=next(kernels)),
            layers.Dense(NUM_CLASSES, kernel_initializer=next(kernels)),
        ]
    )


def create_wide() -> Any:
    """A perceptron of 22 M parameters: much to send and to update for what there is to compute."""
    import keras
    from keras import layers

    kernels = _kernels()
    hidden = [layers.Dense(WIDE_WIDTH, activation="relu", kernel_initializer=next(kernels)) for _ in range(3)]
    last = layers.Dense(NUM_CLASSES, kernel_initializer=next(kernels))
    return keras.Sequential([keras.Input((WIDE_WIDTH,)), *hidden, last])


def create_many() -> Any:
    """A residual perceptron whose 0.6 M parameters lie in 300 tensors."""
    import keras
    from keras import layers

    kernels = _kernels()
    inputs = values = keras.Input((MANY_WIDTH,))
    for _ in range(MANY_LAYERS - 1):
        more = layers.Dense(MANY_WIDTH, activation="tanh", kernel_initializer=next(kernels))(values)
        values = layers.add([values, more])
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, kernel_initializer=next(kernels))(values))


def create_tiny() -> Any:
    """A small perceptron: a step of 2 to 3 ms, most of which is not computation."""
    import keras
    from keras import layers

    kernels = _kernels()
    hidden = [layers.Dense(TINY_WIDTH, activation="relu", kernel_initializer=next(kernels)) for _ in range(2)]
    return keras.Sequential(
        [keras.Input((TINY_WIDTH,)), *hidden, layers.Dense(NUM_CLASSES, kernel_initializer=next(kernels))]
    )


def _kernels() -> Iterator[Any]:
    """An initializer for each layer, with a seed of its own."""
    import keras

    return (keras.initializers.VarianceScaling(0.5, seed=seed) for seed in itertools.count(1))


MODELS = {
    "CNN": Model(create_cnn, (24, 24, 3), num_samples=15_360, local_batch_size=128, learning_rate=1e-4),
    "WIDE": Model(create_wide, (WIDE_WIDTH,), num_samples=3_840, local_batch_size=32, learning_rate=1e-3),
    "MANY": Model(create_many, (MANY_WIDTH,), num_samples=15_360, local_batch_size=64, learning_rate=1e-5),
    "TINY": Model(create_tiny, (TINY_WIDTH,), num_samples=15_360, local_batch_size=64, learning_rate=1e-3),
}
