"""Numbers that each training step of a ``fit`` with ``callbacks.Run`` keeps, of all ranks and of this rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Votes:
    """Travels with the gradients of a step, so that all ranks stop after the same one."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._mine = tf.Variable([0, 1], trainable=False)
            # Sums over all ranks, and the reductions that this rank has begun, when the last step ended.
            self._all = tf.Variable([0, 0, 0], trainable=False)
            self._begun = tf.Variable(0, trainable=False)  # reductions that this rank has begun
            self._nonfinite = tf.Variable(0, trainable=False)  # the first of the latest that were not finite here; or 0
        self.is_summed = False  # by a step that has been traced

    def mine(self, gradients: Sequence[Any]) -> tf.Tensor:
        """int32 [2]: 1 from ``vote`` on, until then 0, and 1; as part of a graph that has computed ``gradients``.

        Of a loop that makes no step, as where Keras finds the data at their end, TensorFlow runs all the same what is
        made of captured variables alone: this rank would take part in a step of the others.
        """
        with tf.control_dependencies(tf.nest.flatten(gradients[0], expand_composites=True)):
            number = self._begun.assign_add(1)
            mine = self._mine.read_value()
        # A loss that is not finite makes the gradients of all variables so that it depends on. Two are enough to read:
        # the last variable is next to the loss, as a rule, and the smallest is the cheapest.
        values = list(map(_values, gradients))
        smallest = min(values, key=lambda value: value.shape.num_elements() or math.inf)
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in (smallest, values[-1])])
        first = tf.where(self._nonfinite > 0, self._nonfinite, number)
        self._nonfinite.assign(tf.where(is_finite, 0, first))
        return mine

    def note(self, total: tf.Tensor) -> None:
        """Keep the sum over all ranks; as part of a graph."""
        self.is_summed = True
        self._all.assign(tf.concat([total, [self._begun]], axis=0))

    def vote(self) -> None:
        """Have this rank's wish travel with the next step."""
        self._mine.assign([1, 1])

    def count(self) -> tuple[int, int]:
        """The ranks that wished to stop in the last step, and those that trained it: the same on each of these."""
        votes, ranks, _ = self._all.numpy()
        return int(votes), int(ranks)

    def is_reducing(self) -> bool:
        """True if this rank has the gradients of its present step; any thread may ask."""
        return int(self._begun.numpy()) > int(self._all.numpy()[2])

    def num_reductions(self) -> int:
        """The reductions that this rank has begun."""
        return int(self._begun.numpy())

    def first_nonfinite(self) -> int:
        """The first of the latest reductions to which this rank has given values that are not finite, from 1; or 0."""
        return int(self._nonfinite.numpy())


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
