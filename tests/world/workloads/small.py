"""Workloads that train in no time: 107 synthetic samples, a small dense network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from ringtrain import Sources, Workload, augment, from_arrays

NUM_SAMPLES = 107
NUM_FEATURES = 6
NUM_CLASSES = 3


class Small(Workload):
    """A regularised classifier with augmentation."""

    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 16, "epochs": 2}

    def create_model(self) -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((NUM_FEATURES,)),
                layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01), name="hidden"),
                layers.Dense(NUM_CLASSES, name="output"),
            ],
            name="small",
        )

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        del data_dir, synthetic
        generator = np.random.default_rng(7)
        x = generator.standard_normal((NUM_SAMPLES, NUM_FEATURES)).astype(np.float32)
        source = from_arrays(x, np.argmax(x[:, :NUM_CLASSES], axis=1))
        return Sources(source, source)

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)

    def metrics(self, y: tf.Tensor, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"accuracy": keras.metrics.sparse_categorical_accuracy(y, outputs)}

    def augment(self, x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return x + 0.1 * augment.uniform(keys, 0, (NUM_FEATURES,)), y


class Embedded(Small):
    """With an embedding, whose gradient is sparse."""

    def create_model(self) -> keras.Model:
        inputs = keras.Input((NUM_FEATURES,))
        x = layers.Flatten()(layers.Embedding(5, 2)(keras.ops.cast(keras.ops.clip(inputs + 2, 0, 4), "int32")))
        return keras.Model(inputs, layers.Dense(NUM_CLASSES)(x))


class OwnModel(keras.Sequential):
    """A model with a training step for `fit`."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class OwnStep(Small):
    """Whose model has a training step that is never called."""

    def create_model(self) -> keras.Model:
        return OwnModel([keras.Input((NUM_FEATURES,)), layers.Dense(NUM_CLASSES)], name="own_model")


class DropoutAndBatchNorm(Small):
    """With the two kinds of layers whose results depend on the number of ranks by design."""

    def create_model(self) -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((NUM_FEATURES,)),
                layers.Dense(8, activation="tanh"),
                layers.BatchNormalization(name="normalization"),
                layers.Dropout(0.5, name="dropout"),
                layers.Dense(NUM_CLASSES),
            ],
            name="dropout_and_batch_norm",
        )


class LiveBatchNorm(Small):
    """Local BatchNorm and regularisation, as a plain Keras loop trains them."""

    def create_model(self) -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((NUM_FEATURES,)),
                layers.Dense(8, activation="tanh", kernel_regularizer="l2", bias_regularizer="l1"),
                layers.BatchNormalization(momentum=0.75),
                layers.Dropout(0.5),
                layers.Dense(NUM_CLASSES),
            ],
            name="live_batch_norm",
        )


class Attention(Small):
    """A small transformer: softmax does not see what its key's bias adds, whose gradient is rounding alone."""

    def create_model(self) -> keras.Model:
        inputs = keras.Input((NUM_FEATURES,))
        x = layers.Dense(4)(layers.Reshape((NUM_FEATURES, 1))(inputs))
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 2, name="attention")(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(4)(layers.Dense(8, activation="gelu")(x)))
        return keras.Model(inputs, layers.Dense(NUM_CLASSES)(layers.Flatten()(x)), name="transformer")


class Normalized(Small):
    """The normalization takes away what the bias before it adds; a layer is unused, and one is dead."""

    def create_model(self) -> keras.Model:
        from ringtrain import SyncBatchNormalization

        inputs = keras.Input((NUM_FEATURES,))
        x = SyncBatchNormalization(name="normalization")(layers.Dense(5, name="shifted")(inputs))
        x = layers.Dense(4, activation="tanh")(x)
        dead = layers.Dense(3, activation="relu", bias_initializer=keras.initializers.Constant(-100.0), name="dead")(x)
        unused = layers.Dense(2, name="unused")(x)
        return Unused(inputs, [layers.Dense(NUM_CLASSES)(layers.Concatenate()([x, dead])), unused], name="normalized")


class Unused(keras.Model):
    """A model whose second output nobody reads."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return super().call(*args, **kwargs)[0]


class Squares(Small):
    """A loss that meets the outputs with labels of float32, and regularisers that were made before the model."""

    def create_model(self) -> keras.Model:
        regularizer = OldL1(0.01)
        return keras.Sequential(
            [keras.Input((NUM_FEATURES,)), layers.Dense(1, kernel_regularizer=regularizer, bias_regularizer="l1")]
        )

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        del data_dir, synthetic
        x = np.random.default_rng(7).standard_normal((NUM_SAMPLES, NUM_FEATURES)).astype(np.float32)
        source = from_arrays(x, np.abs(x[:, 0]))
        return Sources(source, source)

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return (y - outputs[:, 0]) ** 2

    def metrics(self, y: tf.Tensor, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"error": abs(y - outputs[:, 0])}


class OldL1(keras.regularizers.Regularizer):
    """L1 as Keras had it up to 3.13: its factor is of the type of the moment of its creation."""

    def __init__(self, factor: float) -> None:
        self.factor = tf.constant(factor, tf.float32)

    def __call__(self, x: Any) -> Any:
        return self.factor * keras.ops.sum(keras.ops.absolute(x))


class MixedTypes(Squares):
    """A loss with a constant of float32, which float64 does not mix with."""

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return tf.constant(0.5, tf.float32) * super().loss(y, outputs)
