"""Two numbers that every rank adds to each training step of ``fit``: has it been asked to stop, and is it there?"""

from __future__ import annotations

import tensorflow as tf


class Votes:
    """Travels with the gradients of a step, so that all ranks stop after the same one."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._mine = tf.Variable([0, 1], trainable=False)
            self._all = tf.Variable([0, 0], trainable=False)
        self.is_summed = False  # by a step that has been traced

    def mine(self, gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
        """int32 [2]: 1 from ``vote`` on, until then 0, and 1; as part of a graph that has computed ``gradient``.

        Of a loop that makes no step, as where Keras finds the data at their end, TensorFlow runs all the same what is
        made of captured variables alone: this rank would take part in a step of the others.
        """
        with tf.control_dependencies(tf.nest.flatten(gradient, expand_composites=True)):
            return self._mine.read_value()

    def note(self, total: tf.Tensor) -> None:
        """Keep the sum over all ranks; as part of a graph."""
        self.is_summed = True
        self._all.assign(total)

    def vote(self) -> None:
        """Have this rank's wish travel with the next step."""
        self._mine.assign([1, 1])

    def count(self) -> tuple[int, int]:
        """The ranks that wished to stop in the last step, and those that trained it: the same on each of these."""
        votes, ranks = self._all.numpy()
        return int(votes), int(ranks)
