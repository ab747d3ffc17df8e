"""Workloads whose samples are compared with the others of their batch."""

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from ringtrain import all_gather
from tests.world.workloads.small import NUM_CLASSES, NUM_FEATURES, Small


class Centred(Small):
    """A loss of outputs from which the mean over the batch is taken."""

    def loss(self, y: Any, outputs: Any) -> tf.Tensor:
        return super().loss(y, outputs - tf.reduce_mean(outputs, axis=0))


class CentredTogether(Small):
    """The same over all ranks."""

    needs_every_rank = True

    def loss(self, y: Any, outputs: Any) -> tf.Tensor:
        return super().loss(y, outputs - tf.reduce_mean(all_gather(outputs), axis=0))


class Undeclared(CentredTogether):
    """The same, without saying that every rank is needed."""

    needs_every_rank = False


class CentringLayer(keras.layers.Layer):
    """A layer that takes the mean over the batch of all ranks from its inputs."""

    needs_every_rank = True

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs - tf.reduce_mean(all_gather(inputs), axis=0) if training else inputs


class CentredInside(Small):
    """A model with such a layer."""

    def create_model(self) -> keras.Model:
        inputs = keras.Input((NUM_FEATURES,))
        x = CentringLayer()(layers.Dense(8)(inputs))
        return keras.Model(inputs, layers.Dense(NUM_CLASSES)(layers.Activation("tanh")(x)))
