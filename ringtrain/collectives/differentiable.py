"""Four operations between a tensor that all ranks hold (the whole) and the part of a rank, with gradients.

    take    whole -> this rank's rows        gather  this rank's rows -> whole, in the order of the ranks
    spread  whole -> the same, used here     add     this rank's part -> the sum over all ranks

The two of a pair are the gradients of each other. The gradient of a whole is alike on all ranks, which compute the same
loss from it. So a rank takes its own rows of it, not multiplied by the number of ranks; and what the ranks did with the
same whole, each in its own way, adds up. A name must be like no other in the graph, and the same on all ranks.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from ringtrain.collectives.base import Collective
from ringtrain.collectives.gradients import GradientReduction, by_type
from ringtrain.collectives.joined import ranks_for

Tensors = list[tf.Tensor]
# TensorFlow's graphs of the branches and bodies within a function.
BRANCH_GRAPHS = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")

# Recorders of the calls of ``all_gather`` while a step is traced.
_calls: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("calls", default=None)
_uses: weakref.WeakKeyDictionary[tf.Graph, collections.Counter[str]] = weakref.WeakKeyDictionary()


def all_gather(tensor: tf.Tensor) -> tf.Tensor:
    """Concatenate a tensor of all ranks, with gradients: [n, ...] -> [sum of all n, ...], in the order of the ranks.

    A loss that compares a sample with the others of its batch (InfoNCE, batch centring) then sees those of all ranks.
    Each rank may have another n, also 0. The gradient is the sum over all ranks of what each of them did with the
    whole, so that N ranks train what one process trains. One process gets its own tensor.

    Every rank must call it in every step: in a ``fit`` of ``ringtrain.keras`` give all ranks the same number of
    batches, for training and validation, as a rank that has none left does not answer. If a workload's ``loss`` or
    ``metrics`` call it, set ``needs_every_rank = True`` in its class; for a layer in that of the layer, which calls it
    in training alone.

    Raises:
        UsageError: a launcher has started several processes, and nothing has joined them; or ``needs_every_rank`` is
            missing.
    """
    tensor = tf.convert_to_tensor(tensor)
    if (calls := _calls.get()) is not None:
        calls.append("all_gather")
    collective = ranks_for("ringtrain.all_gather")
    if collective is None:
        return tensor
    name = unique_name("all_gather")
    whole = gather(tensor, collective, name)
    return spread([whole], collective, f"{name}/used")[0] if is_differentiable(whole) else whole


@contextlib.contextmanager
def noting_calls() -> Iterator[list[str]]:
    """The calls of ``all_gather`` within this scope."""
    token = _calls.set([])
    try:
        calls = _calls.get()
        assert calls is not None
        yield calls
    finally:
        _calls.reset(token)


def take(whole: tf.Tensor, start: Any, rows: Any, collective: Collective, name: str) -> tf.Tensor:
    """This rank's rows of a tensor that all ranks hold: [n, ...] -> [rows, ...]."""

    gradient_names = _names_of_gradients(name)

    def forward(whole: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
        def gradient(upstream: Any) -> tf.Tensor:
            return gather(tf.convert_to_tensor(upstream), collective, next(gradient_names))

        return whole[start : start + rows], gradient

    return tf.custom_gradient(forward)(whole) if is_differentiable(whole) else forward(whole)[0]


def gather(part: tf.Tensor, collective: Collective, name: str) -> tf.Tensor:
    """The rows of all ranks, in their order: [n_r, ...] -> [sum of n_r, ...]."""
    rank = collective.world.rank

    gradient_names = _names_of_gradients(name)

    def forward(part: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
        def gradient(upstream: Any) -> tf.Tensor:
            name = next(gradient_names)
            counts = collective.all_gather(hide(tf.shape(part, tf.int64)[:1]), name=f"{name}/rows")  # [size]
            start = tf.reduce_sum(counts[:rank])
            return take(tf.convert_to_tensor(upstream), start, counts[rank], collective, name)

        whole = collective.all_gather(hide(part), name=name)
        shape = [None, *part.shape[1:]] if part.shape.rank is not None else None
        return tf.ensure_shape(whole, shape), gradient

    return tf.custom_gradient(forward)(part) if is_differentiable(part) else forward(part)[0]


def spread(tensors: Tensors, collective: Collective, name: str) -> Tensors:
    """Mark values that are equal on all ranks (tensors or handles of variables), so that their gradients are summed."""

    gradient_names = _names_of_gradients(name)

    def forward(*tensors: tf.Tensor) -> tuple[Tensors, Callable[..., Tensors]]:
        def gradient(*upstream: Any) -> Tensors:
            return add([tf.convert_to_tensor(part) for part in upstream], collective, next(gradient_names))

        return [tf.identity(tensor) for tensor in tensors], gradient

    return tf.nest.flatten(tf.custom_gradient(forward)(*tensors)) if tensors else []


def add(parts: Tensors, collective: Collective, name: str) -> Tensors:
    """The sum of each tensor over all ranks, in groups of one type."""

    def forward(*parts: tf.Tensor) -> tuple[Tensors, Callable[..., Tensors]]:
        group_name = f"{name}/{parts[0].dtype.name}"
        gradient_names = _names_of_gradients(group_name)

        def gradient(*upstream: Any) -> Tensors:
            return spread([tf.convert_to_tensor(whole) for whole in upstream], collective, next(gradient_names))

        return collective.all_reduce([hide(part) for part in parts], name=group_name).tensors, gradient

    def sum_group(group: Tensors) -> Tensors:
        return tf.nest.flatten(
            tf.custom_gradient(forward)(*group) if is_differentiable(group[0]) else forward(*group)[0]
        )

    return by_type(parts, sum_group)


def take_and_spread(
    inputs: Tensors,
    shared: Tensors,
    cut: Callable[[tf.Tensor], tf.Tensor],
    rows: Any,
    collective: Collective,
    name: str,
) -> tuple[Tensors, Tensors]:
    """``take`` of some tensors and ``spread`` of others, as one operation.

    Eagerly the ranks meet one operation after the other, and TensorFlow calls the gradients of several operations in an
    order of its own, which is not the same on all ranks. ``cut`` gives the rows of an input [n, ...] to go on with:
    this rank's own, ``rows`` of them, and perhaps others behind, to be dropped.
    """
    gradient_names = _names_of_gradients(name)
    num_inputs = len(inputs)

    def forward(*tensors: tf.Tensor) -> tuple[Tensors, Callable[..., Tensors]]:
        def gradient(*upstream: Any) -> Tensors:
            name = next(gradient_names)
            parts = [tf.convert_to_tensor(part) for part in upstream]
            GradientReduction.calls += 1  # this process does not train on its own
            gathered = [gather(part[:rows], collective, f"{name}/{i}") for i, part in enumerate(parts[:num_inputs])]
            return gathered + add(parts[num_inputs:], collective, name)

        return [*map(cut, tensors[:num_inputs]), *map(tf.identity, tensors[num_inputs:])], gradient

    if not (inputs or shared):
        return [], []
    tensors = tf.nest.flatten(tf.custom_gradient(forward)(*inputs, *shared))
    return tensors[:num_inputs], tensors[num_inputs:]


def is_differentiable(tensor: tf.Tensor) -> bool:
    """True if it is a tensor with gradients, or the handle of a variable with gradients."""
    dtype = tensor.dtype
    if dtype == tf.resource:
        data = getattr(tensor, "_handle_data", None)
        if data is None or not data.is_set or len(data.shape_and_type) != 1:
            return False  # a table or such
        dtype = tf.as_dtype(data.shape_and_type[0].dtype)
    return dtype.is_floating or dtype.is_complex


def unique_name(prefix: str) -> str:
    """A name for the collectives of one call, unlike that of any other call in the same function.

    It counts the calls while a tf.function is traced, which every rank does in the same order. It restarts with each
    trace: ranks trace at other times, if one creates variables within the first trace, or gets other shapes.
    Eagerly, if one operation ends before the next begins, it is the prefix.
    """
    if tf.executing_eagerly():
        return prefix
    graph = tf.compat.v1.get_default_graph()
    while type(graph).__name__ in BRANCH_GRAPHS:
        graph = graph.outer_graph
    uses = _uses.setdefault(graph, collections.Counter())
    uses[prefix] += 1
    return f"{prefix}_{uses[prefix]}"


def _names_of_gradients(name: str) -> Iterator[str]:
    """A name for each time that the gradient of an operation is built.

    It follows from the operation's own: TensorFlow builds the gradients of a graph in another order on each rank.
    """
    return (f"{name}/gradient_{number}" for number in itertools.count(1))


def hide(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, of which TensorFlow's optimizer does not know whether it is constant; without a copy.

    Horovod's operations are not marked as stateful: one with a constant input, such as the zeros of a rank without
    samples, would be run once, while the graph is optimized, and never again, though other ranks wait for it.
    """
    if tf.executing_eagerly():
        return tensor
    with tf.device("CPU"):  # a random whole number below 1 is stateful to TensorFlow
        zero = tf.raw_ops.RandomUniformInt(shape=tf.zeros([0], tf.int32), minval=0, maxval=1, seed=1, seed2=1)
    values = tf.slice(tf.reshape(tensor, [-1]), [zero], [-1])  # all of them
    return tf.ensure_shape(tf.reshape(values, tf.shape(tensor)), tensor.shape)
