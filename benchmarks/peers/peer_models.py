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
NUM_WORDS, NUM_POSITIONS, TOKEN_WIDTH, NUM_BLOCKS, NUM_HEADS = 4000, 32, 128, 7, 4


class Model(NamedTuple):
    create: Callable[[], Any]  # () -> keras.Model with logits of NUM_CLASSES
    sample_shape: tuple[int, ...]
    num_samples: int  # of the synthetic data
    local_batch_size: int  # samples per rank
    learning_rate: float  # small, so that rounding does not change the trajectory
    optimizer: str = "SGD"  # Keras' name, default settings
    num_words: int = 0  # if not 0, samples are integers below it


def make_samples(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Return x float32 [n, *sample_shape] and labels int64 [n].

    Each class is a centre with noise: gradients of pure noise would cancel, except for rounding.
    """
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((NUM_CLASSES, *model.sample_shape), np.float32)
    labels = generator.integers(0, NUM_CLASSES, model.num_samples)
    noise = generator.standard_normal((model.num_samples, *model.sample_shape), np.float32)
    values = centres[labels] + noise
    if model.num_words:
        spread = model.num_words * (0.5 + values / 10)
        return np.clip(spread, 0, model.num_words - 1).astype(np.int32), labels
    return values, labels


def create_optimizer(model: Model) -> Any:
    import keras

    return getattr(keras.optimizers, model.optimizer)(model.learning_rate)


def create_cnn() -> Any:
    """TensorFlow's CIFAR-10 tutorial on 24x24 crops: 1.07 M parameters in 10 tensors."""
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
    """A perceptron of 22 M parameters: much communication and update per computation."""
    import keras
    from keras import layers

    kernels = _kernels()
    hidden = [layers.Dense(WIDE_WIDTH, activation="relu", kernel_initializer=next(kernels)) for _ in range(3)]
    last = layers.Dense(NUM_CLASSES, kernel_initializer=next(kernels))
    return keras.Sequential([keras.Input((WIDE_WIDTH,)), *hidden, last])


def create_many() -> Any:
    """A residual perceptron of 0.6 M parameters in 300 tensors."""
    import keras
    from keras import layers

    kernels = _kernels()
    inputs = values = keras.Input((MANY_WIDTH,))
    for _ in range(MANY_LAYERS - 1):
        more = layers.Dense(MANY_WIDTH, activation="tanh", kernel_initializer=next(kernels))(values)
        values = layers.add([values, more])
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, kernel_initializer=next(kernels))(values))


def create_tiny() -> Any:
    """A small perceptron: a step of 2 to 3 ms, mostly overhead."""
    import keras
    from keras import layers

    kernels = _kernels()
    hidden = [layers.Dense(TINY_WIDTH, activation="relu", kernel_initializer=next(kernels)) for _ in range(2)]
    return keras.Sequential(
        [keras.Input((TINY_WIDTH,)), *hidden, layers.Dense(NUM_CLASSES, kernel_initializer=next(kernels))]
    )


def create_transformer() -> Any:
    """A small transformer of 2 M parameters, a quarter of them in an embedding."""
    import keras
    from keras import layers

    kernels = _kernels()

    def dense(units: int, activation: str | None = None) -> Any:
        return layers.Dense(units, activation=activation, kernel_initializer=next(kernels))

    words = keras.Input((NUM_POSITIONS,), dtype="int32")
    values = layers.Embedding(NUM_WORDS, TOKEN_WIDTH, embeddings_initializer=next(kernels))(words)  # [n, 32, 128]
    for _ in range(NUM_BLOCKS):
        normal = layers.LayerNormalization()(values)
        attention = layers.MultiHeadAttention(
            NUM_HEADS, TOKEN_WIDTH // NUM_HEADS, use_bias=False, kernel_initializer=next(kernels)
        )  # a key bias' gradient is only rounding, which Adam would follow
        values = layers.add([values, attention(normal, normal)])
        normal = layers.LayerNormalization()(values)
        values = layers.add([values, dense(TOKEN_WIDTH)(dense(4 * TOKEN_WIDTH, "gelu")(normal))])
    pooled = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(values))
    return keras.Model(words, dense(NUM_CLASSES)(pooled))


def _kernels() -> Iterator[Any]:
    """One initializer per layer, each with its seed."""
    import keras

    return (keras.initializers.VarianceScaling(0.5, seed=seed) for seed in itertools.count(1))


CNN = Model(create_cnn, (24, 24, 3), num_samples=15_360, local_batch_size=128, learning_rate=1e-4)
WIDE = Model(create_wide, (WIDE_WIDTH,), num_samples=3_840, local_batch_size=32, learning_rate=1e-3)
MANY = Model(create_many, (MANY_WIDTH,), num_samples=15_360, local_batch_size=64, learning_rate=1e-5)
TINY = Model(create_tiny, (TINY_WIDTH,), num_samples=15_360, local_batch_size=64, learning_rate=1e-3)
MODELS = {
    "CNN": CNN,
    "WIDE": WIDE,
    "MANY": MANY,
    "TINY": TINY,
    "WIDE_ADAM": WIDE._replace(learning_rate=1e-6, optimizer="Adam"),
    "MANY_ADAM": MANY._replace(learning_rate=1e-6, optimizer="Adam"),
    "TRANSFORMER": Model(
        create_transformer,
        (NUM_POSITIONS,),
        num_samples=7_680,
        local_batch_size=16,
        learning_rate=1e-5,
        optimizer="Adam",
        num_words=NUM_WORDS,
    ),
}
