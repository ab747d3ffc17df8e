"""Four differentiable operations between a tensor that all ranks hold (the whole) and a rank's part.

    take                 whole -> this rank's rows
    gather               this rank's rows -> whole, in the order of the ranks
    all_reduce_gradient  whole -> the same, used here
    add                  this rank's part -> the sum over all ranks

``take`` and ``gather`` are each other's gradients, and so are the other two. A whole's gradient is identical on all
ranks, since they compute the same loss from it: a rank takes its rows unscaled. Names must be unique in the graph and
the same on all ranks.
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
from ringtrain.collectives.context import current_collective
from ringtrain.collectives.gradients import GradientReduction, by_type
from ringtrain.runtime.private import handle_data_of

Tensors = list[tf.Tensor]
BRANCH_GRAPHS = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")

# While a step is traced.
_calls: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("calls", default=None)
_uses: weakref.WeakKeyDictionary[tf.Graph, collections.Counter[str]] = weakref.WeakKeyDictionary()


def all_gather(tensor: tf.Tensor) -> tf.Tensor:
    """Concatenate a tensor of all ranks, with gradients: [n, ...] -> [sum of all n, ...], in the order of the ranks.

    For losses that compare samples of the global batch (InfoNCE, batch centring). Ranks may have different n, also 0.
    The gradient sums all ranks' uses of the whole. One process gets its own tensor.

    Every rank must call it in every step: in a ``fit`` of ``ringtrain.keras`` give all ranks the same number of
    training and validation batches. A workload whose ``loss`` or ``metrics`` call it must set ``needs_every_rank =
    True``; so must a layer, which may call it in training only.

    Raises:
        UsageError: several processes that nothing has joined; or ``needs_every_rank`` is missing.
    """
    tensor = tf.convert_to_tensor(tensor)
    if (calls := _calls.get()) is not None:
        calls.append("all_gather")
    collective = current_collective("ringtrain.all_gather")
    if collective is None:
        return tensor
    name = unique_name("all_gather")
    whole = gather(tensor, collective, name)
    return all_reduce_gradient([whole], collective, f"{name}/used")[0] if is_differentiable(whole) else whole


@contextlib.contextmanager
def noting_calls() -> Iterator[list[str]]:
    token = _calls.set([])
    try:
        calls = _calls.get()
        assert calls is not None
        yield calls
    finally:
        _calls.reset(token)


def take(whole: tf.Tensor, start: Any, rows: Any, collective: Collective, name: str) -> tf.Tensor:
    """[n, ...] -> [rows, ...]."""

    gradient_names = _names_of_gradients(name)

    def forward(whole: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
        def gradient(upstream: Any) -> tf.Tensor:
            return gather(tf.convert_to_tensor(upstream), collective, next(gradient_names))

        return whole[start : start + rows], gradient

    return tf.custom_gradient(forward)(whole) if is_differentiable(whole) else forward(whole)[0]


def gather(part: tf.Tensor, collective: Collective, name: str) -> tf.Tensor:
    """[n_r, ...] -> [sum of n_r, ...]."""
    rank = collective.world.rank

    gradient_names = _names_of_gradients(name)

    def forward(part: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
        def gradient(upstream: Any) -> tf.Tensor:
            name = next(gradient_names)
            counts = collective.all_gather(
                prevent_constant_folding(tf.shape(part, tf.int64)[:1]), name=f"{name}/rows"
            )  # [size]
            start = tf.reduce_sum(counts[:rank])
            return take(tf.convert_to_tensor(upstream), start, counts[rank], collective, name)

        whole = collective.all_gather(prevent_constant_folding(part), name=name)
        shape = [None, *part.shape[1:]] if part.shape.rank is not None else None
        return tf.ensure_shape(whole, shape), gradient

    return tf.custom_gradient(forward)(part) if is_differentiable(part) else forward(part)[0]


def all_reduce_gradient(tensors: Tensors, collective: Collective, name: str) -> Tensors:
    """Sum the gradients of values (tensors or variable handles) that are equal on all ranks."""

    gradient_names = _names_of_gradients(name)

    def forward(*tensors: tf.Tensor) -> tuple[Tensors, Callable[..., Tensors]]:
        def gradient(*upstream: Any) -> Tensors:
            return add([tf.convert_to_tensor(part) for part in upstream], collective, next(gradient_names))

        return [tf.identity(tensor) for tensor in tensors], gradient

    return tf.nest.flatten(tf.custom_gradient(forward)(*tensors)) if tensors else []


def add(parts: Tensors, collective: Collective, name: str) -> Tensors:
    def forward(*parts: tf.Tensor) -> tuple[Tensors, Callable[..., Tensors]]:
        group_name = f"{name}/{parts[0].dtype.name}"
        gradient_names = _names_of_gradients(group_name)

        def gradient(*upstream: Any) -> Tensors:
            return all_reduce_gradient(
                [tf.convert_to_tensor(whole) for whole in upstream], collective, next(gradient_names)
            )

        return collective.all_reduce([prevent_constant_folding(part) for part in parts], name=group_name), gradient

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
    """Combine ``take`` and ``all_reduce_gradient``: TensorFlow's order of several gradients differs between
    ranks.

    ``cut`` returns [n, ...]: this rank's ``rows``, then possibly others to drop.
    """
    gradient_names = _names_of_gradients(name)
    num_inputs = len(inputs)

    def forward(*tensors: tf.Tensor) -> tuple[Tensors, Callable[..., Tensors]]:
        def gradient(*upstream: Any) -> Tensors:
            name = next(gradient_names)
            parts = [tf.convert_to_tensor(part) for part in upstream]
            GradientReduction.calls += 1
            gathered = [gather(part[:rows], collective, f"{name}/{i}") for i, part in enumerate(parts[:num_inputs])]
            return gathered + add(parts[num_inputs:], collective, name)

        return [*map(cut, tensors[:num_inputs]), *map(tf.identity, tensors[num_inputs:])], gradient

    if not (inputs or shared):
        return [], []
    tensors = tf.nest.flatten(tf.custom_gradient(forward)(*inputs, *shared))
    return tensors[:num_inputs], tensors[num_inputs:]


def is_differentiable(tensor: tf.Tensor) -> bool:
    dtype = tensor.dtype
    if dtype == tf.resource:
        data = handle_data_of(tensor)
        if data is None or not data.is_set or len(data.shape_and_type) != 1:
            return False  # such as a table
        dtype = tf.as_dtype(data.shape_and_type[0].dtype)
    return dtype.is_floating or dtype.is_complex


def unique_name(prefix: str) -> str:
    """Name one call's collectives. Calls are counted per trace: ranks may trace at different times."""
    if tf.executing_eagerly():
        return prefix
    graph = tf.compat.v1.get_default_graph()
    while type(graph).__name__ in BRANCH_GRAPHS:
        graph = graph.outer_graph
    uses = _uses.setdefault(graph, collections.Counter())
    uses[prefix] += 1
    return f"{prefix}_{uses[prefix]}"


def _names_of_gradients(name: str) -> Iterator[str]:
    """Derive names from the operation's: TensorFlow's build order of gradients differs between ranks."""
    return (f"{name}/gradient_{number}" for number in itertools.count(1))


def prevent_constant_folding(tensor: tf.Tensor) -> tf.Tensor:
    """Horovod's operations are not stateful: one with a constant input would run only in graph optimization, and other
    ranks would wait.
    """
    if tf.executing_eagerly():
        return tensor
    with tf.device("CPU"):  # stateful: a random integer below 1
        zero = tf.raw_ops.RandomUniformInt(shape=tf.zeros([0], tf.int32), minval=0, maxval=1, seed=1, seed2=1)
    values = tf.slice(tf.reshape(tensor, [-1]), [zero], [-1])
    return tf.ensure_shape(tf.reshape(values, tf.shape(tensor)), tensor.shape)
