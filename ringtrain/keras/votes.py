"""Numbers that each step of a ``fit`` with ``callbacks.Run`` sums or records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Votes:
    """Summed with the gradients, so that all ranks stop after the same step."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._mine = tf.Variable([0, 1], trainable=False)
            # Sums over all ranks, and ``_begun`` after the last step.
            self._all = tf.Variable([0, 0, 0], trainable=False)
            self._begun = tf.Variable(0, trainable=False)
            self._nonfinite = tf.Variable(0, trainable=False)
        self.is_summed = False

    def mine(self, gradients: Sequence[Any]) -> tf.Tensor:
        """int32 [2]: (1 if this rank voted, 1), in a graph that has computed ``gradients``.

        Otherwise TensorFlow would run it when the data end, without a step, and this rank would join another's step.
        """
        with tf.control_dependencies(tf.nest.flatten(gradients[0], expand_composites=True)):
            number = self._begun.assign_add(1)
            mine = self._mine.read_value()
        # Gradients that depend on a non-finite loss are non-finite. Two suffice: the last, mostly next to the loss, and
        # the smallest.
        values = list(map(_values, gradients))
        smallest = min(values, key=lambda value: value.shape.num_elements() or math.inf)
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in (smallest, values[-1])])
        first = tf.where(self._nonfinite > 0, self._nonfinite, number)
        self._nonfinite.assign(tf.where(is_finite, 0, first))
        return mine

    def note(self, total: tf.Tensor) -> None:
        self.is_summed = True
        self._all.assign(tf.concat([total, [self._begun]], axis=0))

    def vote(self) -> None:
        self._mine.assign([1, 1])

    def count(self) -> tuple[int, int]:
        """Votes to stop, and ranks that trained the last step; equal on these."""
        votes, ranks, _ = self._all.numpy()
        return int(votes), int(ranks)

    def is_reducing(self) -> bool:
        """Thread-safe."""
        return int(self._begun.numpy()) > int(self._all.numpy()[2])

    def find_nonfinite(self) -> tuple[int, int]:
        """Return the first of the latest non-finite reductions in a row, from 1 (0: none), and their number so far."""
        return int(self._nonfinite.numpy()), int(self._begun.numpy())


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
