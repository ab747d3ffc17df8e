"""Workloads that compute a part in a narrower type than the run asks for."""

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tests.world.workloads.small import NUM_CLASSES, NUM_FEATURES, Small

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none", dtype="float32")


class LossObject(Small):
    """A loss object that was made at import, in the type of that moment."""

    def loss(self, y: Any, outputs: Any) -> tf.Tensor:
        return LOSS(y, outputs)


class FloatSoftmax(Small):
    """The last layer of Keras' guide to mixed precision."""

    def create_model(self) -> keras.Model:
        inputs = keras.Input((NUM_FEATURES,))
        x = layers.Dense(NUM_CLASSES)(layers.Dense(8, activation="tanh")(inputs))
        return keras.Model(inputs, layers.Activation("softmax", dtype="float32", name="probabilities")(x))

    def loss(self, y: Any, outputs: Any) -> tf.Tensor:
        return keras.losses.sparse_categorical_crossentropy(y, outputs)


class OwnPolicy(Small):
    """A policy that is set where the model is created."""

    def create_model(self) -> keras.Model:
        keras.config.set_dtype_policy("mixed_bfloat16")
        keras.config.set_floatx("float32")
        return super().create_model()


class Casts(Small):
    """A loss that casts to the type of its constant."""

    def loss(self, y: Any, outputs: Any) -> tf.Tensor:
        return tf.constant(0.5, tf.float32) * super().loss(y, tf.cast(outputs, tf.float32))


class Halves(keras.layers.Layer):
    """A layer that computes in half precision, whatever its type."""

    def call(self, inputs: Any) -> Any:
        return keras.ops.cast(keras.ops.tanh(keras.ops.cast(inputs, "bfloat16")), self.compute_dtype)


class Nearby(keras.layers.Layer):
    """A layer that casts by TensorFlow's operation itself."""

    def call(self, inputs: Any) -> Any:
        return tf.cast(tf.raw_ops.Cast(x=inputs, DstT=tf.bfloat16), inputs.dtype)


class RawCasts(Small):
    """A model with a layer whose cast nobody changes."""

    def create_model(self) -> keras.Model:
        inputs = keras.Input((NUM_FEATURES,))
        x = Nearby(name="nearby")(layers.Dense(8)(inputs))
        return keras.Model(inputs, layers.Dense(NUM_CLASSES)(x))


class HalfLayer(Small):
    """A model with a layer that computes in half precision."""

    def create_model(self) -> keras.Model:
        inputs = keras.Input((NUM_FEATURES,))
        x = Halves(name="halves")(layers.Dense(8)(inputs))
        return keras.Model(inputs, layers.Dense(NUM_CLASSES)(x))
