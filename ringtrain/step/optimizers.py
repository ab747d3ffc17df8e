"""Keras' most used optimizers, with updates that read and write each value once.

Keras writes an update as several operations, each of which goes through memory with all values: on cores, where large
layers do not fit into a cache, that takes as long as a good part of the backward pass. TensorFlow has each of these
formulas as one operation. Variables, settings and formulas are Keras' own.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


class FusedSGDUpdate:
    """The update of SGD: plain, with momentum, or Nesterov's."""

    def update_step(self: Any, gradient: Any, variable: tf.Variable, learning_rate: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]
            return
        dtype = variable.dtype
        learning_rate, gradient = tf.cast(learning_rate, dtype), tf.cast(gradient, dtype)
        if not self.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=learning_rate, delta=gradient)
            return
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=self.momentums[self._get_variable_index(variable)].value.handle,
            lr=learning_rate,
            grad=gradient,
            momentum=tf.cast(self.momentum, dtype),
            use_nesterov=self.nesterov,
        )


class FusedAdamUpdate:
    """The update of Adam and AdamW (whose weight decay is not part of it)."""

    def update_step(self: Any, gradient: Any, variable: tf.Variable, learning_rate: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices) or self.amsgrad:
            super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]
            return
        dtype, index = variable.dtype, self._get_variable_index(variable)
        step = tf.cast(self.iterations + 1, dtype)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._momentums[index].value.handle,
            v=self._velocities[index].value.handle,
            beta1_power=tf.cast(self.beta_1, dtype) ** step,
            beta2_power=tf.cast(self.beta_2, dtype) ** step,
            lr=tf.cast(learning_rate, dtype),
            beta1=tf.constant(self.beta_1, dtype),  # not cast: a number of Python's would become a float32 before
            beta2=tf.constant(self.beta_2, dtype),
            epsilon=tf.constant(self.epsilon, dtype),
            grad=tf.cast(gradient, dtype),
        )


class FusedSGD(FusedSGDUpdate, keras.optimizers.SGD):
    """Keras' SGD."""


class FusedAdam(FusedAdamUpdate, keras.optimizers.Adam):
    """Keras' Adam."""


class FusedAdamW(FusedAdamUpdate, keras.optimizers.AdamW):
    """Keras' AdamW."""


FUSED = {"sgd": FusedSGD, "adam": FusedAdam, "adamw": FusedAdamW}  # by the names of the settings
FUSED_UPDATES: dict[type, type] = {
    keras.optimizers.SGD: FusedSGDUpdate,
    keras.optimizers.Adam: FusedAdamUpdate,
    keras.optimizers.AdamW: FusedAdamUpdate,
}  # of Keras' own classes, not of what inherits from them


def only_reads_gradients(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether no variable of the optimizer takes over a gradient, or a part of one, as it is: known of these alone."""
    return type(optimizer) in FUSED.values()
