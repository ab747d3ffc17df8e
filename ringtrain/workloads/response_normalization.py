"""Local response normalisation for all types, with a fast gradient."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


@keras.saving.register_keras_serializable(package="ringtrain")
class LocalResponseNormalization(keras.layers.Layer):
    """Local response normalisation over channels (Krizhevsky, Sutskever and Hinton 2012, 3.3).

    As ``tf.nn.local_response_normalization``: y_i = x_i / (bias + alpha * sum of x_j**2, |j - i| <= radius)**beta, with
    a band matrix: TensorFlow's kernel has float32 and float16 only, and is four times slower on CPUs.
    """

    def __init__(self, *, depth_radius: int, bias: float, alpha: float, beta: float, **options: Any) -> None:
        super().__init__(**options)
        self.depth_radius, self.bias, self.alpha, self.beta = depth_radius, bias, alpha, beta

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """[..., channels]. Half precision is computed in float32: squares would overflow."""
        x = inputs if inputs.dtype == tf.float64 else tf.cast(inputs, tf.float32)
        channels = np.arange(x.shape[-1])
        window = np.abs(channels[:, np.newaxis] - channels) <= self.depth_radius  # [channels, channels]
        squares = tf.reshape(tf.square(x), [-1, len(channels)])  # 2-D: one product instead of one per row
        sums = tf.reshape(tf.matmul(squares, tf.constant(window, x.dtype)), tf.shape(x))
        scale = tf.exp(-self.beta * tf.math.log(self.bias + self.alpha * sums))  # four times as fast as tf.pow
        return tf.cast(x * scale, inputs.dtype)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("depth_radius", "bias", "alpha", "beta")}
        return {**super().get_config(), **own}
