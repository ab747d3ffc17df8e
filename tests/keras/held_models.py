"""Models whose training changes more than their weights and their compiled optimizer."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ringtrain.keras as hvd
from tests.keras.metrics import LargestError

BATCHES, BATCH_SIZE, TIME_STEPS = 4, 2, 3


class Gan(keras.Model):
    """A generator and a discriminator, each with an optimizer, which the model holds in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
        self.discriminator = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(4, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
        )
        self.optimizers_by_name: dict[str, Any] = {}
        self.num_steps = tf.Variable(0, trainable=False)

    def call(self, inputs: Any) -> Any:
        return self.generator(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        real, noise = data
        with tf.GradientTape() as tape:
            real_scores = self.discriminator(real, training=True)
            fake_scores = self.discriminator(self.generator(noise), training=True)
            discriminator_loss = tf.reduce_mean(tf.nn.softplus(fake_scores) + tf.nn.softplus(-real_scores))
        self._update(self.optimizer, tape, discriminator_loss, self.discriminator)
        with tf.GradientTape() as tape:
            scores = self.discriminator(self.generator(noise), training=True)
            generator_loss = tf.reduce_mean(tf.nn.softplus(-scores))
        self._update(self.optimizers_by_name["generator"], tape, generator_loss, self.generator)
        self.num_steps.assign_add(1)
        return {"discriminator_loss": discriminator_loss, "generator_loss": generator_loss}

    def _update(self, optimizer: Any, tape: tf.GradientTape, loss: tf.Tensor, network: keras.Model) -> None:
        weights = network.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


class MeanWeights(keras.callbacks.Callback):
    """Holds the mean of the first weight over the steps so far, in variables in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.state:
            shape = self.model.trainable_variables[0].shape
            self.state = {"mean": tf.Variable(tf.zeros(shape)), "steps": keras.Variable(0, trainable=False)}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state["steps"].assign_add(1)
        difference = tf.cast(self.model.trainable_variables[0].value, tf.float32) - self.state["mean"]
        self.state["mean"].assign_add(difference / tf.cast(self.state["steps"].value, tf.float32))


def make_gan() -> keras.Model:
    model = Gan()
    model.build((None, 3))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    model.optimizers_by_name["generator"] = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02))
    return model


def make_gan_data() -> tf.data.Dataset:
    random = np.random.default_rng([1, hvd.rank()])
    samples = BATCHES * BATCH_SIZE
    real = random.normal(2, 1, size=(samples, 2)).astype("float32")
    noise = random.normal(size=(samples, 3)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((real, noise)).batch(BATCH_SIZE, drop_remainder=True)


def make_stateful() -> keras.Model:
    """A stateful RNN, whose state Keras lists nowhere, and a metric whose state is a maximum."""
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(BATCH_SIZE, TIME_STEPS, 1)),
            keras.layers.LSTM(3, stateful=True),
            keras.layers.Dense(1),
        ]
    )
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", metrics=[LargestError()])
    return model


def make_stateful_data() -> tf.data.Dataset:
    random = np.random.default_rng([2, hvd.rank()])
    x = random.normal(size=(BATCHES * BATCH_SIZE, TIME_STEPS, 1)).astype("float32")
    y = x.sum(axis=1)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE, drop_remainder=True)


KINDS = {"gan": (make_gan, make_gan_data), "stateful": (make_stateful, make_stateful_data)}
