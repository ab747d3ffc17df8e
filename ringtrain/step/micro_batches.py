"""A rank's batch in parts: the gradients and sums of its micro-batches, added up one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ringtrain.step.structure import Forward


def add_up(
    compute: Callable[[Any, Any, Sequence[tuple[keras.Variable, tf.Tensor]], tf.Tensor], Forward],
    *,
    num_samples: tf.Tensor,
    num_micro_batches: int,
    variables: Sequence[keras.Variable],
    needs_all: bool,
) -> Forward:
    """The sums over all micro-batches, in a loop of TensorFlow's, so that only one of them is in memory.

    Args:
        compute: (first sample, end, state with its values after the micro-batch before, number) -> what that
            micro-batch gave. The first one gets no state.
        num_samples: of this rank's batch, int64 [].
        num_micro_batches: at most so many, of equally many samples; the last ones may be smaller, or missing.
        variables: those that the gradients are of.
        needs_all: compute missing ones as well, without samples.
    """
    size = -(-num_samples // num_micro_batches)
    first = compute(0, tf.minimum(size, num_samples), [], tf.constant(0))

    def add(number: tf.Tensor, gradients: list[Any], sums: tf.Tensor, state: list[tf.Tensor]) -> tuple[Any, ...]:
        start = tf.minimum(tf.cast(number, tf.int64) * size, num_samples)
        updated = list(zip(first.structure.state, state, strict=True))
        more = compute(start, tf.minimum(start + size, num_samples), updated, number)
        gradients = [_add(a, _unpack(b)) for a, b in zip(gradients, more.gradients, strict=True)]
        return number + 1, gradients, sums + more.sums, more.state

    gradients = [_unpack(gradient) for gradient in first.gradients]
    loop_variables = (tf.constant(1), gradients, first.sums, first.state)
    shapes = tf.nest.map_structure(lambda t: t.shape, loop_variables)
    shapes[1][:] = [_growing_shape(gradient) for gradient in gradients]
    _, gradients, sums, state = tf.while_loop(
        lambda number, *_: needs_all or tf.cast(number, tf.int64) * size < num_samples,
        add,
        loop_variables,
        shape_invariants=shapes,
        parallel_iterations=1,
        maximum_iterations=num_micro_batches - 1,
    )
    return Forward([_pack(g, v) for g, v in zip(gradients, variables, strict=True)], sums, state, first.structure)


def _unpack(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """A sparse gradient as a pair of tensors (values, indices), which a loop can carry."""
    return (gradient.values, gradient.indices) if isinstance(gradient, tf.IndexedSlices) else gradient


def _pack(gradient: tf.Tensor | tuple[tf.Tensor, tf.Tensor], variable: keras.Variable) -> tf.Tensor | tf.IndexedSlices:
    return tf.IndexedSlices(*gradient, tf.constant(list(variable.shape))) if isinstance(gradient, tuple) else gradient


def _add(a: Any, b: Any) -> Any:
    """The sum of two unpacked gradients; the rows of sparse ones one after the other."""
    if isinstance(a, tuple):
        return tuple(tf.concat([left, right], axis=0) for left, right in zip(a, b, strict=True))
    return a + b


def _growing_shape(gradient: Any) -> Any:
    """The shape of an unpacked gradient in a loop: the number of rows of a sparse one grows."""
    if isinstance(gradient, tuple):
        return tuple(tf.TensorShape([None, *part.shape[1:]]) for part in gradient)
    return gradient.shape
