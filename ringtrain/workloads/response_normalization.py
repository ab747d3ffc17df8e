"""Local response normalisation as a Keras layer, for every type and with a fast gradient."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


@keras.saving.register_keras_serializable(package="ringtrain")
class LocalResponseNormalization(keras.layers.Layer):
    """Each value divided by what its neighbours in channel add up to (Krizhevsky, Sutskever and Hinton 2012, 3.3).

    As ``tf.nn.local_response_normalization``: y_i = x_i / (bias + alpha * sum of x_j**2, |j - i| <= radius)**beta.
    TensorFlow's kernel knows float32 and float16 alone, and its gradient on a CPU is a loop over single values: forward
    and backward take four times as long. Here the sum over a window of channels is a product with a constant band
    matrix, and so is its gradient.
    """

    def __init__(self, *, depth_radius: int, bias: float, alpha: float, beta: float, **options: Any) -> None:
        super().__init__(**options)
        self.depth_radius, self.bias, self.alpha, self.beta = depth_radius, bias, alpha, beta

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Normalise [..., channels]. Half precision is computed in float32: squares would leave its range."""
        dtype = tf.float64 if inputs.dtype == tf.float64 else tf.float32
        return tf.cast(self._normalize(tf.cast(inputs, dtype)), inputs.dtype)

    def _normalize(self, inputs: tf.Tensor) -> tf.Tensor:
        channels = np.arange(inputs.shape[-1])
        window = np.abs(channels[:, np.newaxis] - channels) <= self.depth_radius  # [channels, channels]
        squares = tf.reshape(
            tf.square(inputs), [-1, len(channels)]
        )  # two dimensions: one product, not one for each row
        sums = tf.reshape(tf.matmul(squares, tf.constant(window, inputs.dtype)), tf.shape(inputs))
        return inputs * tf.exp(
            -self.beta * tf.math.log(self.bias + self.alpha * sums)
        )  # tf.pow takes four times as long

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("depth_radius", "bias", "alpha", "beta")}
        return {**super().get_config(), **own}
