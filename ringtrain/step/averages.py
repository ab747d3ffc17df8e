"""The moving average of the weights, for evaluation.

An evaluation reads it through a scope: no save or step sees it.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf


class WeightAverages:
    """Moving average of each trainable variable; none if ``decay`` is 0."""

    def __init__(self, weights: Sequence[keras.Variable], *, decay: float) -> None:
        self._decay = decay
        self._weights = list(weights) if decay else []
        self.variables = [
            keras.Variable(tf.convert_to_tensor(v.value), trainable=False, dtype=v.dtype, name="average")
            for v in self._weights
        ]

    @property
    def pairs(self) -> list[tuple[keras.Variable, keras.Variable]]:
        return list(zip(self._weights, self.variables, strict=True))

    def update(self, num_updates: tf.Tensor) -> None:
        """Use decay min(decay, (1 + t) / (10 + t)), as TensorFlow's ``ExponentialMovingAverage``."""
        for weight, average in self.pairs:
            updates = tf.cast(num_updates, average.dtype)
            decay = tf.minimum(tf.cast(self._decay, average.dtype), (1 + updates) / (10 + updates))
            average.assign(average.value - (1 - decay) * (average.value - weight.value))
