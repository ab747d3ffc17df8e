"""Workloads that draw random numbers in every call, whatever ``training`` says."""

import os
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from ringtrain import Sources
from tests.world.workloads.small import NUM_CLASSES, NUM_FEATURES, Small


class Sampling(layers.Layer):
    """Adds noise, as the usual layer of a variational autoencoder."""

    def __init__(self, kind: str) -> None:
        super().__init__(name="sampling")
        self.kind = kind
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        shape = keras.ops.shape(inputs)
        if self.kind == "generator":
            return inputs + keras.random.normal(shape, seed=self.seed_generator, dtype=inputs.dtype)
        if self.kind == "unseeded":
            return inputs * keras.random.uniform(shape, 0.5, 1.5, dtype=inputs.dtype)
        if self.kind == "tensorflow":
            return inputs + tf.random.truncated_normal(tf.shape(inputs), dtype=inputs.dtype)
        if self.kind == "dropout":
            return keras.random.dropout(inputs, 0.5, seed=self.seed_generator)
        if self.kind == "categorical":
            drawn = keras.random.categorical(inputs, 1, seed=self.seed_generator)
            return inputs + keras.ops.cast(drawn, inputs.dtype)
        return inputs * keras.random.gamma(shape, 2.0, seed=self.seed_generator, dtype=inputs.dtype)


class Drawing(Small):
    """The small classifier, with noise in its hidden layer."""

    kind = "generator"

    def create_model(self) -> keras.Model:
        inputs = keras.Input((NUM_FEATURES,))
        hidden = layers.Dense(8, activation="tanh", name="hidden")(inputs)
        return keras.Model(inputs, layers.Dense(NUM_CLASSES)(Sampling(self.kind)(hidden)))


class DrawingUnseeded(Drawing):
    kind = "unseeded"


class DrawingByTensorFlow(Drawing):
    kind = "tensorflow"


class DrawingDropout(Drawing):
    kind = "dropout"


class DrawingCategorical(Drawing):
    kind = "categorical"


class DrawingGamma(Drawing):
    """Its draws are not made equal."""

    kind = "gamma"


class DrawingLoss(Small):
    """A loss with noise."""

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        noise = keras.random.normal(keras.ops.shape(outputs), dtype=outputs.dtype)
        return super().loss(y, outputs + noise)


class DrawingAugment(Small):
    """An augmentation whose random numbers depend on the batch, not on the samples."""

    def augment(self, x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return x + tf.random.stateless_normal(tf.shape(x), [1, 2], dtype=x.dtype), y


class NeededAugment(DrawingAugment):
    """The model takes only what this augmentation, which is as wrong, leaves of a sample."""

    num_kept = NUM_FEATURES - 2

    def create_model(self) -> keras.Model:
        return keras.Sequential([keras.Input((self.num_kept,)), layers.Dense(NUM_CLASSES)])

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        return Sources(super().create_sources(data_dir, synthetic=synthetic).train)

    def augment(self, x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x, y = super().augment(x, y, keys)
        return x[:, : self.num_kept], y


class OtherLossOnThreeRanks(Small):
    """One and two ranks train the same; its augmentation is right."""

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        is_wrong = os.environ.get("OMPI_COMM_WORLD_SIZE") == "3"
        return super().loss(y, outputs) * (1.5 if is_wrong else 1.0)
