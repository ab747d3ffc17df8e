"""The sums of one step of ``fit``, recorded so that a rank without batches can contribute zeros."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
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
