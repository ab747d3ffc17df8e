"""Dynamic loss scaling of mixed_float16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ringtrain.collectives.gradients import scaled

INITIAL_LOSS_SCALE = 2.0**15
LOSS_SCALE_GROWTH_STEPS = 2000  # Micikevicius et al. 2018; as in NVIDIA's and Keras' dynamic scaling
MIN_LOSS_SCALE = 1.0


class LossScale:
    """Prevents underflow of float16 gradients (Micikevicius et al. 2018); 1 if not dynamic."""

    def __init__(self, *, is_dynamic: bool) -> None:
        self.is_dynamic = is_dynamic
        self.variables: list[keras.Variable] = []
        if is_dynamic:
            self._value = keras.Variable(INITIAL_LOSS_SCALE, trainable=False, dtype="float32", name="loss_scale")
            self._good_steps = keras.Variable(0, trainable=False, dtype="int32", name="good_steps")
            self.variables = [self._value, self._good_steps]

    @property
    def value(self) -> tf.Tensor:
        """Current scale, float32 []."""
        return tf.convert_to_tensor(self._value.value) if self.is_dynamic else tf.constant(1.0)

    def scale(self, objective: tf.Tensor) -> tf.Tensor:
        return objective * tf.cast(self.value, objective.dtype) if self.is_dynamic else objective

    def unscale(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices], scale: tf.Tensor) -> list[Any]:
        if not self.is_dynamic:
            return list(gradients)
        return [scaled(gradient, 1 / scale) for gradient in gradients]

    def adapt(self, is_finite: tf.Tensor) -> None:
        if not self.is_dynamic:
            return
        good_steps = tf.where(is_finite, self._good_steps.value + 1, 0)
        grows = good_steps >= LOSS_SCALE_GROWTH_STEPS
        factor = tf.where(is_finite, tf.where(grows, 2.0, 1.0), 0.5)
        grown = self._value.value * factor
        self._value.assign(tf.where(tf.math.is_finite(grown), tf.maximum(grown, MIN_LOSS_SCALE), self._value.value))
        self._good_steps.assign(tf.where(grows, 0, good_steps))
