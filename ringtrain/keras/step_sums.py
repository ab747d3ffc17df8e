"""The sums of one step of ``fit``, recorded so that a rank without batches can contribute zeros, and its votes."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from ringtrain.collectives.gradients import GradientReduction

Gradients = list[Any]  # per variable: tf.Tensor, tf.IndexedSlices or None


@dataclass(frozen=True)
class Sum:
    """Gradients, and last the number of ranks that train."""

    reduction: GradientReduction
    nothing: list[Callable[[], Any]]  # zeros of a joined rank, per tensor
    num_gradients: int
    scale: float | tf.Tensor  # elastic: a tensor of the step's graph

    is_native: bool  # its sums are scaled already

    def act(self, tensors: Gradients) -> Gradients:
        if self.is_native:
            return self.reduction.single_all_reduce(tensors, scaled=(self.num_gradients, float(self.scale)))
        return self.reduction.all_reduce(tensors)

    @functools.cached_property
    def traced(self) -> Callable[[Gradients], Gradients]:
        """Traced once, not per epoch."""
        return tf.function(self.act, autograph=False)


class StepSums:
    """In order, of all optimizers and tapes of a step.

    Traced sums live as long as their graph; eager ones until the next step.
    """

    def __init__(self) -> None:
        self._of_graphs: weakref.WeakKeyDictionary[Any, list[Sum]] = weakref.WeakKeyDictionary()
        self._outside: list[Sum] = []
        self._graph: Callable[[], Any] = lambda: None
        self.is_new = False  # until the first sum of a step
        self.is_of_graph = False

    def add(self, one: Sum, graph: Any, *, is_owner: bool) -> None:
        """``is_owner``: of the model's optimizer, whose graph is the step's."""
        if graph is None and self.is_new:
            self._outside = []
        self.is_new = False
        (self._outside if graph is None else self._of_graphs.setdefault(graph, [])).append(one)
        if is_owner:
            self.is_of_graph = graph is not None
            self._graph = weakref.ref(graph) if graph is not None else lambda: None

    def read(self) -> list[Sum]:
        """Empty if the graph is gone."""
        if not self.is_of_graph:
            return self._outside
        graph = self._graph()
        return [] if graph is None else self._of_graphs.get(graph, [])


def zeros_like_gradient(tensor: Any, shape: Any) -> Callable[[], Any]:
    """``shape`` is the variable's, or None."""
    if isinstance(tensor, tf.IndexedSlices):
        values, indices = tensor.values.dtype, tensor.indices.dtype
        return lambda: tf.IndexedSlices(tf.zeros([0, *shape[1:]], values), tf.zeros([0], indices), tf.constant(shape))
    zeros, dtype = tensor.shape if shape is None else shape, tensor.dtype
    return lambda: tf.zeros(zeros, dtype)


def outermost_graph() -> Any:
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and hasattr(graph.outer_graph, "outer_graph"):
        graph = graph.outer_graph
    return graph


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
