"""The moving average of the weights, which is evaluated in their stead.

The weights themselves are never swapped: an evaluation reads the averages through a scope of its own, so that nothing
else, such as a save or a step, can see them in the weights' place.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf


class WeightAverages:
    """An exponential moving average of each trainable variable; none at all where ``decay`` is 0."""

    def __init__(self, weights: Sequence[keras.Variable], *, decay: float) -> None:
        self._decay = decay
        self._weights = list(weights) if decay else []
        self.variables = [
            keras.Variable(tf.convert_to_tensor(v.value), trainable=False, dtype=v.dtype, name="average")
            for v in self._weights
        ]

    @property
    def pairs(self) -> list[tuple[keras.Variable, keras.Variable]]:
        """Each weight with its average."""
        return list(zip(self._weights, self.variables, strict=True))

    def update(self, num_updates: tf.Tensor) -> None:
        """Take in the weights after an update, of which this is the ``num_updates``-th.

        The decay is min(decay, (1 + t) / (10 + t)), as TensorFlow's ``ExponentialMovingAverage`` has it, so that the
        first weights are soon forgotten.
        """
        for weight, average in self.pairs:
            updates = tf.cast(num_updates, average.dtype)
            decay = tf.minimum(tf.cast(self._decay, average.dtype), (1 + updates) / (10 + updates))
            average.assign(average.value - (1 - decay) * (average.value - weight.value))
