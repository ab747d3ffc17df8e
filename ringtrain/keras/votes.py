"""Numbers that each training step of a ``fit`` with ``callbacks.Run`` sums over all ranks or records on this one."""

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
            # Sums over all ranks, and ``_begun`` after the last step.
            self._all = tf.Variable([0, 0, 0], trainable=False)
            self._begun = tf.Variable(0, trainable=False)  # reductions begun by this rank
            self._nonfinite = tf.Variable(0, trainable=False)  # see ``first_nonfinite``
        self.is_summed = False  # by a step that has been traced

    def mine(self, gradients: Sequence[Any]) -> tf.Tensor:
        """int32 [2]: (1 if this rank voted, 1), in a graph that has computed ``gradients``.

        Without that dependency, TensorFlow would run it even in a loop without steps, when Keras finds the end of the
        data, and this rank would take part in another rank's step.
        """
        with tf.control_dependencies(tf.nest.flatten(gradients[0], expand_composites=True)):
            number = self._begun.assign_add(1)
            mine = self._mine.read_value()
        # A non-finite loss reaches all gradients that depend on it. Two suffice: the last variable's, mostly next to
        # the loss, and the smallest, the cheapest.
        values = list(map(_values, gradients))
        smallest = min(values, key=lambda value: value.shape.num_elements() or math.inf)
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in (smallest, values[-1])])
        first = tf.where(self._nonfinite > 0, self._nonfinite, number)
        self._nonfinite.assign(tf.where(is_finite, 0, first))
        return mine

    def note(self, total: tf.Tensor) -> None:
        """Record the sum over all ranks, in the graph."""
        self.is_summed = True
        self._all.assign(tf.concat([total, [self._begun]], axis=0))

    def vote(self) -> None:
        """Ask to stop, in the next step."""
        self._mine.assign([1, 1])

    def count(self) -> tuple[int, int]:
        """Return the votes to stop and the ranks that trained in the last step; equal on these ranks."""
        votes, ranks, _ = self._all.numpy()
        return int(votes), int(ranks)

    def is_reducing(self) -> bool:
        """True if this rank has this step's gradients. Thread-safe."""
        return int(self._begun.numpy()) > int(self._all.numpy()[2])

    def num_reductions(self) -> int:
        return int(self._begun.numpy())

    def first_nonfinite(self) -> int:
        """First of the latest series of this rank's non-finite reductions, from 1; 0: none."""
        return int(self._nonfinite.numpy())


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
