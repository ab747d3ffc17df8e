"""Horovod's operations on tensors, in eager code and in graphs.

Arguments are those of ``horovod.tensorflow.keras``, and by name those of ``horovod.tensorflow``.
Gradients are Horovod's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ringtrain.collectives.context import is_alone
from ringtrain.collectives.gradients import by_type
from ringtrain.errors import UsageError
from ringtrain.keras.collective import require_init
from ringtrain.keras.exchanged_tensors import (
    Tensors,
    exchange_rows,
    gather_tensor,
    operation_name,
    reduce_tensors,
    scatter_tensor,
    send_tensor,
    sum_sparse,
    to_tensor,
)

ALL = hvd.global_process_set


def tensor_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Prepare a public operation: it needs ``init()``, and AutoGraph leaves it unchanged.

    The first argument may be given as ``tensor=``, its name in ``horovod.tensorflow``.
    """

    @functools.wraps(function)
    def operation(*args: Any, **kwargs: Any) -> Any:
        require_init(function.__name__)
        if not args and "tensor" in kwargs:
            kwargs["value"] = kwargs.pop("tensor")
        return function(*args, **kwargs)

    return functools.wraps(function)(tf.autograph.experimental.do_not_convert(operation))


@tensor_operation
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = hvd.Compression.none,
    *,
    device_dense: str = "",
    device_sparse: str = "",
    process_set: Any = ALL,
    ignore_name_scope: bool = True,
) -> Any:
    """Reduce a tensor over the ranks. Collective.

    Args:
        value: a tensor, variable, array or number, equal in shape on all ranks; or an
            ``IndexedSlices``, whose result has each row once.
        name: of the operation; default: by the order of the calls.
        average: the old name of ``op``.
        prescale_factor, postscale_factor: factors before and after the reduction.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        compression: ``Compression.none`` or ``fp16``.
        device_dense, device_sparse: TensorFlow devices of the operation.
        process_set: the participating ranks.
        ignore_name_scope: ignored; names are without scopes.
    """
    if isinstance(name, bool):  # the second argument of horovod.tensorflow
        average = name
        name = None
    [total] = grouped_allreduce(
        [value],
        average=average,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        name=name or "allreduce",
    )
    return total


@tensor_operation
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = ALL,
    ignore_name_scope: bool = True,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors of any types. Arguments as for ``allreduce``. Collective."""
    op = hvd.handle_average_backwards_compatibility(op, average)
    name = operation_name(name or "grouped_allreduce")
    results: list[Any] = list(tensors)
    dense = [index for index, each in enumerate(tensors) if not isinstance(each, tf.IndexedSlices)]
    for index, each in enumerate(tensors):
        if index not in dense:
            results[index] = sum_sparse(
                each,
                op=op,
                factor=prescale_factor * postscale_factor,
                device=device_sparse,
                process_set=process_set,
                name=f"{name}.{index}",
            )

    def reduce_group(group: Tensors) -> Tensors:
        with tf.device(device_dense):
            return reduce_tensors(
                group,
                op=op,
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                process_set=process_set,
                name=f"{name}.{group[0].dtype.name}",
            )

    given = [to_tensor(tensors[index]) for index in dense]
    packed = [compression.compress(tensor) for tensor in given]
    totals = by_type([tensor for tensor, _ in packed], reduce_group)
    for index, total, (_, context) in zip(dense, totals, packed, strict=True):
        results[index] = compression.decompress(total, context)
    return results


@tensor_operation
def allgather(
    value: Any,
    name: str | None = None,
    *,
    ignore_name_scope: bool = True,
    process_set: Any = ALL,
) -> tf.Tensor:
    """Concatenate a tensor of all ranks: [n, ...] -> [sum of all n, ...]. Collective."""
    name = operation_name(name or "allgather")
    return gather_tensor(to_tensor(value), process_set=process_set, name=name)


@tensor_operation
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = True,
    process_set: Any = ALL,
) -> Tensors:
    """Gather each of several tensors. Collective."""
    name = operation_name(name or "grouped_allgather")
    return [
        gather_tensor(to_tensor(tensor), process_set=process_set, name=f"{name}.{number}")
        for number, tensor in enumerate(tensors)
    ]


@tensor_operation
def broadcast(
    value: Any,
    root_rank: int,
    name: str | None = None,
    *,
    ignore_name_scope: bool = True,
    process_set: Any = ALL,
) -> tf.Tensor:
    """Return the root's tensor. Collective."""
    name = operation_name(name or "broadcast")
    return send_tensor(to_tensor(value), root_rank, process_set=process_set, name=name)


@tensor_operation
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: Any = ALL,
) -> Tensors:
    """Set variables of TensorFlow or Keras to the root's values, which are returned. Collective."""
    name = operation_name(name or "broadcast_")
    values = []
    for number, variable in enumerate(variables):
        given = to_tensor(variable)
        value = send_tensor(given, root_rank, process_set=process_set, name=f"{name}.{number}")
        variable.assign(value)
        values.append(value)
    return values


@tensor_operation
def alltoall(
    value: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = True,
    process_set: Any = ALL,
) -> Any:
    """Send rows of a tensor to each rank, and concatenate the received ones. Collective.

    Args:
        value: [n, ...].
        splits: int32 [ranks], numbers of rows for each rank; None: equal parts.

    Returns:
        The received rows; with ``splits`` a pair of them and of the numbers from each rank.
    """
    tensor = to_tensor(value)
    name = operation_name(name or "alltoall")
    if splits is None:
        size = 1 if is_alone() else process_set.size()
        remainder = tf.shape(tensor)[0] % size
        tf.debugging.assert_equal(remainder, 0, "alltoall: the rows do not divide by the ranks")
        numbers = tf.fill([size], tf.shape(tensor)[0] // size)
    else:
        numbers = tf.cast(tf.convert_to_tensor(splits), tf.int32)
    rows, received = exchange_rows(tensor, numbers, process_set=process_set, name=name)
    return rows if splits is None else (rows, received)


@tensor_operation
def reducescatter(
    value: Any,
    name: str | None = None,
    op: Any = hvd.Average,
    *,
    device_dense: str = "",
    compression: Any = hvd.Compression.none,
    process_set: Any = ALL,
    ignore_name_scope: bool = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce a tensor, and return this rank's part of its rows. Collective.

    The first argument is [n, ...], equal in shape on all ranks; others are those of ``allreduce``.
    """
    [part] = grouped_reducescatter(
        [value],
        device_dense=device_dense,
        compression=compression,
        op=op,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name or "reducescatter",
    )
    return part


@tensor_operation
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = hvd.Compression.none,
    op: Any = hvd.Average,
    process_set: Any = ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> Tensors:
    """Reduce and scatter several tensors. Arguments as for ``reducescatter``. Collective."""
    name = operation_name(name or "grouped_reducescatter")
    options = {
        "op": op,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    parts = []
    for number, each in enumerate(tensors):
        packed, context = compression.compress(to_tensor(each))
        with tf.device(device_dense):
            part = scatter_tensor(packed, **options, name=f"{name}.{number}")
        parts.append(compression.decompress(part, context))
    return parts


@tensor_operation
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = ALL,
) -> Any:
    """Return the root's object, sent as a pickle. Not in a graph. Collective."""
    require_eager("broadcast_object", "broadcast")
    if is_alone():
        return obj
    name = name or "broadcast_object"
    return hvd.broadcast_object(obj, root_rank, name=name, process_set=process_set)


@tensor_operation
def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: Any = ALL,
) -> list[Any]:
    """Return the objects of all ranks, sent as pickles. Not in a graph. Collective."""
    require_eager("allgather_object", "allgather")
    if is_alone():
        return [obj]
    return hvd.allgather_object(obj, name=name or "allgather_object", process_set=process_set)


def require_eager(what: str, instead: str) -> None:
    """Raise UsageError in a graph, which has no Python objects."""
    if not tf.executing_eagerly():
        raise UsageError(
            f"{what} was called in a tf.function, and sends Python objects, which a graph does not "
            f"have. Call it outside, or send a tensor: hvd.{instead}."
        )
