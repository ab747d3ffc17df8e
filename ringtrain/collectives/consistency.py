"""Check that inputs have the same shapes and types on all ranks.

Each call gathers the number of samples and a digest of types and other dimensions; only if they differ, the shapes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from ringtrain.collectives.base import Collective
from ringtrain.collectives.differentiable import gather
from ringtrain.collectives.objects import all_gather_object
from ringtrain.errors import UsageError
from ringtrain.messages.ranks import group_ranks, name_ranks
from ringtrain.messages.rules import shorten
from ringtrain.runtime.private import asynchronous_executor, executor_scope

Inputs = Sequence[tuple[str, Any]]  # labels with tensors [n, ...], or other objects

NAME = "parallel/inputs"
CPU = "/CPU:0"  # avoids NCCL, and waiting for a GPU
MAX_DIMENSIONS = 254  # TensorFlow's limit
MAX_GROUPS = 4


@contextlib.contextmanager
def requiring_same_inputs(inputs: Inputs, collective: Collective, name: str) -> Iterator[list[tf.Tensor]]:
    """Check the inputs during the computation in this scope.

    If they differ, every rank raises UsageError; in a graph, InvalidArgumentError. There, the next collectives must
    depend on the yielded tensors.
    """
    if collective.world.size == 1:
        yield []
    elif not tf.executing_eagerly():
        yield [_check_in_graph(inputs, collective, name)]
    else:
        with tf.device(CPU):
            mine = _what_travels(inputs)
            with executor_scope(_beside()):
                on_ranks = _exchange(collective)(mine)
        try:
            yield []
        except Exception:
            _raise_difference(inputs, on_ranks, collective)
            raise
        _raise_difference(inputs, on_ranks, collective)


@functools.cache
def _beside() -> Any:
    return asynchronous_executor()


@functools.cache
def _exchange(collective: Collective) -> Callable[[tf.Tensor], tf.Tensor]:
    """In a graph Horovod sees the name: no other operation matches."""
    signature = [tf.TensorSpec([1, 2], tf.int64)]
    exchange = tf.function(lambda mine: gather(mine, collective, NAME), input_signature=signature, autograph=False)
    return exchange.get_concrete_function()


def _raise_difference(inputs: Inputs, on_ranks: tf.Tensor, collective: Collective) -> None:
    numbers = on_ranks.numpy()
    if (numbers != numbers[0]).any():
        error = UsageError(_difference_describer(inputs, collective)(*_shapes(inputs)))
        error.is_agreed = True
        raise error from None


def _check_in_graph(inputs: Inputs, collective: Collective, name: str) -> tf.Tensor:
    with tf.device(CPU):
        on_ranks = gather(_what_travels(inputs), collective, f"{name}/inputs")
        shapes = _shapes(inputs)

        def fail() -> tf.Tensor:
            message = tf.numpy_function(_difference_describer(inputs, collective), shapes, tf.string)
            with tf.control_dependencies([tf.debugging.Assert(False, [message])]):
                return tf.constant(False)

        return tf.cond(tf.reduce_all(on_ranks == on_ranks[:1]), lambda: tf.constant(True), fail)


def _what_travels(inputs: Inputs) -> tf.Tensor:
    """Return number of samples and digest, int64 [1, 2], without static shapes, which depend on earlier calls."""
    tensors = [leaf for _, leaf in inputs if isinstance(leaf, tf.Tensor)]
    digest: Any = zlib.crc32(repr([_kind(leaf) for _, leaf in inputs]).encode())
    for number, tensor in enumerate(tensors):
        if tensor.shape[1:].is_fully_defined():
            digest += sum((length + 1) * _weight(number, axis) for axis, length in enumerate(tensor.shape[1:]))
        else:
            weights = tf.constant([_weight(number, axis) for axis in range(MAX_DIMENSIONS)], tf.int64)
            lengths = tf.shape(tensor, tf.int64)[1:]
            digest += tf.reduce_sum((lengths + 1) * weights[: tf.size(lengths)])
    count = tensors[0].shape[0]
    return tf.convert_to_tensor([[tf.shape(tensors[0], tf.int64)[0] if count is None else count, digest]], tf.int64)


def _weight(number: int, axis: int) -> int:
    """26 bits: times a 31-bit length it fits into 63."""
    return zlib.crc32(b"%d %d" % (number, axis)) >> 6


def _kind(leaf: Any) -> str:
    return leaf.dtype.name if isinstance(leaf, tf.Tensor) else repr(leaf)


def _shapes(inputs: Inputs) -> list[tf.Tensor]:
    return [tf.shape(leaf if isinstance(leaf, tf.Tensor) else 0) for _, leaf in inputs]


def _difference_describer(inputs: Inputs, collective: Collective) -> Callable[..., str]:
    """The result keeps no tensors alive. Collective."""
    labels, kinds = [label for label, _ in inputs], [_kind(leaf) for _, leaf in inputs]

    def describe(*shapes: Any) -> str:
        mine = [
            f"{kind} {list(map(int, shape))}".removesuffix(" []") for kind, shape in zip(kinds, shapes, strict=True)
        ]
        of_ranks = all_gather_object(collective, [labels, mine], name=NAME)
        of_inputs = itertools.zip_longest(*(theirs for _, theirs in of_ranks), fillvalue="nothing")
        most_labels = max((theirs for theirs, _ in of_ranks), key=len)
        label, groups = next(
            (label, group_ranks(theirs))
            for label, theirs in zip(most_labels, of_inputs, strict=True)
            if len(set(theirs)) > 1
        )
        shown = itertools.islice(groups.items(), MAX_GROUPS)
        places = [f"{shorten(what)} on {name_ranks(ranks)}" for what, ranks in shown]
        more = f" and {len(groups) - MAX_GROUPS} more kinds" if len(groups) > MAX_GROUPS else ""
        return (
            f"input {label} of a parallel function is {', '.join(places)}{more}; it must be the same on all ranks, "
            "each of which takes its own rows of it. Give every rank the whole batch: let all read the same samples in "
            "the same order, without shard() and without the rank in a seed."
        )

    return describe
