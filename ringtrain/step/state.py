"""State that a forward pass updates (BatchNorm's moving statistics), as sums over all ranks.

Floating-point state becomes the mean over all samples. Integers and booleans must be equal on all ranks with samples.
Each is sent as four 16-bit digits and their squares, in float64. Ranks agree if and only if ``(sum of digits)**2 ==
number of ranks * (sum of squares)`` (Cauchy-Schwarz), exact up to 1,448 ranks. Integers are those of the first
micro-batch: ranks may have different numbers of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ringtrain.errors import UsageError

DIGITS, BITS = 4, 16


def is_integer_or_bool(value: tf.Tensor | keras.Variable) -> bool:
    dtype = tf.as_dtype(value.dtype)
    return dtype.is_integer or dtype.is_bool


def to_summands(values: Sequence[tf.Tensor], *, local_count: tf.Tensor, global_count: tf.Tensor) -> list[tf.Tensor]:
    """``local_count`` of ``global_count`` samples gave ``values``."""
    has_samples = tf.cast(local_count > 0, tf.float64)
    summands = []
    for value in values:
        if is_integer_or_bool(value):
            digits = _to_digits(value)
            summands.append(tf.stack([digits, tf.square(digits)]) * has_samples)
        else:
            dtype = _summed_dtype(value)
            summands.append(tf.cast(value, dtype) * (tf.cast(local_count, dtype) / tf.cast(global_count, dtype)))
    return [*summands, has_samples] if any(map(is_integer_or_bool, values)) else summands


def empty_summands(
    variables: Sequence[keras.Variable], zeros: Callable[[Sequence[Any], tf.DType], tf.Tensor]
) -> list[tf.Tensor]:
    """Zeros of a rank without samples; ``zeros`` takes shape and dtype."""
    summands = [
        zeros([2, DIGITS, *v.shape], tf.float64) if is_integer_or_bool(v) else zeros(v.shape, _summed_dtype(v))
        for v in variables
    ]
    return [*summands, zeros([], tf.float64)] if any(map(is_integer_or_bool, variables)) else summands


def from_sums(sums: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Return the variables' values, and int64 [], the position from 1 of the first one that the ranks have computed
    differently; 0: none.
    """
    num_ranks = sums[-1] if any(map(is_integer_or_bool, variables)) else None
    values, divergent = [], tf.constant(0, tf.int64)
    for position, (total, variable) in reversed(list(enumerate(zip(sums, variables, strict=False), start=1))):
        if is_integer_or_bool(variable):
            digits, squares = tf.unstack(total)
            are_equal = tf.reduce_all(tf.square(digits) == num_ranks * squares)
            divergent = tf.where(are_equal, divergent, tf.constant(position, tf.int64))
            values.append(_from_digits(digits / num_ranks, variable.dtype))
        else:
            values.append(tf.cast(total, variable.dtype))
    return values[::-1], divergent


def require_equal_state(divergent: int, variables: Sequence[keras.Variable], step: int) -> None:
    """Raise UsageError on all ranks."""
    if divergent:
        variable = variables[divergent - 1]
        raise UsageError(
            f"the model's variable {variable.path} ({variable.dtype}) has different values on the ranks after step "
            f"{step}: each rank changes it by its own samples, and whole numbers have no mean. Nothing was updated by "
            "this step. Compute it without the samples, as a counter of steps, or make it a float32 variable, which "
            "becomes the mean over all samples."
        )


def _summed_dtype(value: tf.Tensor | keras.Variable) -> tf.DType:
    return tf.float64 if tf.as_dtype(value.dtype) == tf.float64 else tf.float32


def _to_digits(value: tf.Tensor) -> tf.Tensor:
    """float64 [DIGITS, *shape], lowest first."""
    bits = tf.bitcast(value, tf.int64) if value.dtype == tf.uint64 else tf.cast(value, tf.int64)
    mask = tf.constant(2**BITS - 1, tf.int64)
    shifted = [tf.bitwise.right_shift(bits, tf.constant(BITS * number, tf.int64)) for number in range(DIGITS)]
    return tf.stack([tf.cast(tf.bitwise.bitwise_and(part, mask), tf.float64) for part in shifted])


def _from_digits(digits: tf.Tensor, dtype: str) -> tf.Tensor:
    parts = tf.unstack(tf.cast(digits, tf.int64))
    shifted = [tf.bitwise.left_shift(part, tf.constant(BITS * number, tf.int64)) for number, part in enumerate(parts)]
    bits = functools.reduce(tf.bitwise.bitwise_or, shifted)
    return tf.bitcast(bits, tf.uint64) if dtype == "uint64" else tf.cast(bits, dtype)
