"""Tensors that ranks exchange by Horovod, with gradients and with names of ringtrain.

Horovod matches the ranks' tensors by the names of operations, and takes them from layers and from
the order in which TensorFlow builds gradients. Both may differ between ranks. Here a name follows
from the order of the calls in a function, and a gradient's name from that of its operation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from ringtrain.collectives.context import is_alone
from ringtrain.collectives.differentiable import (
    BRANCH_GRAPHS,
    is_differentiable,
    prevent_constant_folding,
    unique_name,
)
from ringtrain.collectives.gradients import merge_rows, scaled
from ringtrain.errors import UsageError
from ringtrain.keras.collective import is_elastic

Tensors = list[tf.Tensor]


class Reduced:
    """Record of the tensors that a script has reduced in this process: gradients may be among them."""

    shapes: ClassVar[set[tuple[int | None, ...]]] = set()
    num_calls: ClassVar[int] = 0

    @classmethod
    def note(cls, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> None:
        """Record tensors that are reduced together."""
        cls.num_calls += 1
        cls.shapes.update(tuple(each.shape) for each in tensors if each.shape.rank is not None)


def reduce_tensors(
    tensors: Tensors,
    *,
    op: Any,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    name: str,
) -> Tensors:
    """Reduce tensors of one type. Their gradients are reduced in the same way. Collective."""
    Reduced.note(tensors)
    if is_alone():
        factor = prescale_factor * postscale_factor
        return [scaled(tensor, factor) for tensor in tensors]
    options = {
        "op": op,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }

    def forward(*tensors: tf.Tensor) -> Tensors:
        inputs = list(map(prevent_constant_folding, tensors))
        named = {"name": name, "ignore_name_scope": True}
        if len(inputs) == 1:
            return [hvd.allreduce(inputs[0], **options, **named)]
        return list(hvd.grouped_allreduce(inputs, **options, **named))

    def backward(upstream: Tensors, gradient_name: str) -> Tensors:
        return reduce_tensors(upstream, **options, name=gradient_name)

    return with_gradient(forward, backward, tensors, name)


def sum_sparse(
    gradient: tf.IndexedSlices,
    *,
    op: Any,
    factor: float,
    device: str,
    process_set: Any,
    name: str,
) -> tf.IndexedSlices:
    """Return the sum or mean of sparse tensors, with each row once. Collective."""
    if op not in (hvd.Sum, hvd.Average):
        raise UsageError(
            f"allreduce of a sparse tensor has op={op!r}; its rows can be added only. Use hvd.Sum "
            "or hvd.Average, or pass tf.convert_to_tensor(...)."
        )
    Reduced.note([gradient])
    with tf.device(device):
        values = gather_tensor(gradient.values, process_set=process_set, name=f"{name}.values")
        indices = gather_tensor(gradient.indices, process_set=process_set, name=f"{name}.indices")
    if op == hvd.Average and not is_alone():
        size = process_set.size()
        if is_elastic():
            size = hvd.size_op(process_set.process_set_id)
        values = values / tf.cast(size, values.dtype)
    values = scaled(values, factor)
    with tf.device("CPU:0"):  # GPUs add rows in any order: ranks would differ in the last bits
        return merge_rows(tf.IndexedSlices(values, indices, gradient.dense_shape))


def gather_tensor(tensor: tf.Tensor, *, process_set: Any, name: str) -> tf.Tensor:
    """[n, ...] -> [sum of all n, ...]. Collective.

    The gradient is the mean of the ranks' gradients, for this rank's rows.
    """
    if is_alone():
        return tensor

    def forward(tensor: tf.Tensor) -> Tensors:
        given = prevent_constant_folding(tensor)
        return [hvd.allgather(given, name=name, ignore_name_scope=True, process_set=process_set)]

    def backward(upstream: Tensors, gradient_name: str) -> Tensors:
        [mean] = mean_over_ranks(upstream, process_set, gradient_name)
        rows = tf.shape(tensor)[:1]
        counts = gather_tensor(rows, process_set=process_set, name=f"{gradient_name}.rows")
        start = tf.reduce_sum(counts[: process_set.rank()])
        return [mean[start : start + rows[0]]]

    [whole] = with_gradient(forward, backward, [tensor], name)
    shape = tensor.shape
    return tf.ensure_shape(whole, None if shape.rank is None else [None, *shape[1:]])


def send_tensor(tensor: tf.Tensor, root_rank: int, *, process_set: Any, name: str) -> tf.Tensor:
    """Return the root's tensor. Collective.

    The gradient is the mean of the ranks' gradients on the root, and zero on other ranks.
    """
    if is_alone():
        return tensor

    def forward(tensor: tf.Tensor) -> Tensors:
        given = prevent_constant_folding(tensor)
        value = hvd.broadcast(given, root_rank, name=name, ignore_name_scope=True, process_set=process_set)
        return [value]

    def backward(upstream: Tensors, gradient_name: str) -> Tensors:
        [mean] = mean_over_ranks(upstream, process_set, gradient_name)
        # If TensorFlow knew the result, it would remove the sum, and other ranks would wait.
        is_root = prevent_constant_folding(tf.constant(hvd.rank() == root_rank))
        return [tf.where(is_root, mean, tf.zeros_like(mean))]

    [value] = with_gradient(forward, backward, [tensor], name)
    return value


def exchange_rows(
    tensor: tf.Tensor,
    splits: tf.Tensor,
    *,
    process_set: Any,
    name: str,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the received rows and their numbers by rank; gradients go back. Collective."""
    if is_alone():
        return tensor, splits
    received_splits: list[tf.Tensor] = []

    def forward(tensor: tf.Tensor) -> Tensors:
        given = prevent_constant_folding(tensor)
        rows, received = hvd.alltoall(given, splits=splits, name=name, ignore_name_scope=True, process_set=process_set)
        received_splits.append(received)
        return [rows]

    def backward(upstream: Tensors, gradient_name: str) -> Tensors:
        splits = received_splits[-1]
        rows, _ = exchange_rows(upstream[0], splits, process_set=process_set, name=gradient_name)
        return [rows]

    [rows] = with_gradient(forward, backward, [tensor], name)
    return rows, received_splits[-1]


def scatter_tensor(
    tensor: tf.Tensor,
    *,
    op: Any,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    name: str,
) -> tf.Tensor:
    """Return this rank's rows of the reduced tensor; gradients are gathered. Collective."""
    factor = prescale_factor * postscale_factor
    if is_alone():
        return scaled(tensor, factor)

    def forward(tensor: tf.Tensor) -> Tensors:
        part = hvd.reducescatter(
            prevent_constant_folding(tensor),
            op=op,
            name=name,
            process_set=process_set,
            ignore_name_scope=True,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        return [part]

    def backward(upstream: Tensors, gradient_name: str) -> Tensors:
        of_op = process_set.size() if op == hvd.Sum else 1
        gradient = scaled(upstream[0], float(factor * of_op))
        return [gather_tensor(gradient, process_set=process_set, name=gradient_name)]

    [part] = with_gradient(forward, backward, [tensor], name)
    return part


def mean_over_ranks(tensors: Tensors, process_set: Any, name: str) -> Tensors:
    """Return the means over the ranks of a process set. Collective."""
    return reduce_tensors(
        tensors,
        op=hvd.Average,
        prescale_factor=1.0,
        postscale_factor=1.0,
        process_set=process_set,
        name=name,
    )


def with_gradient(
    forward: Callable[..., Tensors],
    backward: Callable[[Tensors, str], Tensors],
    tensors: Tensors,
    name: str,
) -> Tensors:
    """Return ``forward(*tensors)``, with the gradients ``backward(upstream, gradient_name)``."""
    if not all(map(is_differentiable, tensors)):
        return forward(*tensors)
    num_gradients = 0

    @tf.custom_gradient
    def operation(*tensors: tf.Tensor) -> tuple[Tensors, Callable[..., Tensors]]:
        def gradient(*upstream: Any) -> Tensors:
            nonlocal num_gradients
            num_gradients += 1
            dense = [tf.convert_to_tensor(each) for each in upstream]
            return backward(dense, f"{name}.gradient{num_gradients}")

        return forward(*tensors), gradient

    return list(tf.nest.flatten(operation(*tensors)))


def to_tensor(value: Any) -> tf.Tensor:
    """Return the tensor of a tensor, a variable of TensorFlow or Keras, an array or a number."""
    return tf.convert_to_tensor(value.value if isinstance(value, keras.Variable) else value)


def operation_name(name: str) -> str:
    """Return a name that is unique in a graph, and equal on ranks that trace the same function."""
    name = re.sub(r"[^\w.-]", "_", name)
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    while type(graph).__name__ in BRANCH_GRAPHS:
        graph = graph.outer_graph
    function = re.sub(r"[^\w.-]", "_", getattr(graph, "name", "graph"))
    return unique_name(f"ringtrain.{function}.{name}")
