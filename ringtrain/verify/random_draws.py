"""Random draws that are equal for all samples, so that world sizes can be compared.

A layer draws numbers for the rows of a rank's batch, from seeds that differ by rank and step. In a comparison it is
called outside of training, where most layers draw nothing. A layer that still draws, such as the sampling of a
variational autoencoder, gets the same numbers in every row, on every rank and in every step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

SWITCHED_OFF = "its random draws differ by rank; switched off for the comparison"
EQUAL_DRAWS = "it draws random numbers in every call; in the comparison they are equal for all samples and steps"
# Functions of tf.random, which Keras calls, whose draws are equal in distribution in every row.
DRAWS_OF_A_SHAPE = ("stateless_normal", "stateless_truncated_normal", "stateless_uniform")


def make_draws_equal(layer: keras.layers.Layer, notes: list[str]) -> None:
    """Call a layer outside of training, and make the draws of its calls equal. Add a note that says which."""
    calls_without_training = _call_without_training(layer)
    plain_call = layer.call
    number = len(notes)
    notes.append(f"{layer.name}: {SWITCHED_OFF if calls_without_training else EQUAL_DRAWS}")

    @functools.wraps(plain_call)
    def call_with_equal_draws(*arguments: Any, **keywords: Any) -> Any:
        with _equal_draws(layer.name) as draws:
            result = plain_call(*arguments, **keywords)
        if draws:
            notes[number] = f"{layer.name}: {EQUAL_DRAWS}"
        return result

    layer.call = call_with_equal_draws


def switch_off_training(layer: keras.layers.Layer) -> None:
    """Call a layer as outside of training, whatever the model says."""
    _call_without_training(layer)


def _call_without_training(layer: keras.layers.Layer) -> bool:
    """Set the argument ``training`` of a layer's calls to False; return False if it has no such argument."""
    plain_call = layer.call
    signature = inspect.signature(plain_call)
    if "training" not in signature.parameters:
        return False

    @functools.wraps(plain_call)
    def call_outside_of_training(*arguments: Any, **keywords: Any) -> Any:
        bound = signature.bind(*arguments, **keywords)
        bound.arguments["training"] = False
        return plain_call(*bound.args, **bound.kwargs)

    layer.call = call_outside_of_training
    return True


@contextlib.contextmanager
def _equal_draws(name: str) -> Iterator[list[str]]:
    """Replace TensorFlow's random functions in this scope; yield the names of those that were called."""
    draws: list[str] = []

    def constant_seed() -> tf.Tensor:
        return tf.constant([zlib.crc32(name.encode()) % 2**31, len(draws)], tf.int32)

    def replace(function_name: str) -> Callable[..., tf.Tensor]:
        plain_draw = getattr(tf.random, function_name)

        def draw(shape: Any, seed: Any, *arguments: Any, **keywords: Any) -> tf.Tensor:
            draws.append(function_name)
            row = plain_draw(_shape_of_a_row(shape), constant_seed(), *arguments, **keywords)
            return tf.broadcast_to(row, shape)

        return draw

    plain_dropout = tf.nn.experimental.stateless_dropout

    def drop(x: tf.Tensor, rate: Any, seed: Any, noise_shape: Any = None, **keywords: Any) -> tf.Tensor:
        draws.append("stateless_dropout")
        shape = tf.shape(x) if noise_shape is None else noise_shape
        return plain_dropout(x, rate, constant_seed(), noise_shape=_shape_of_a_row(shape), **keywords)

    with contextlib.ExitStack() as stack:
        for function_name in DRAWS_OF_A_SHAPE:
            stack.enter_context(mock.patch.object(tf.random, function_name, replace(function_name)))
        stack.enter_context(mock.patch.object(tf.nn.experimental, "stateless_dropout", drop))
        yield draws


def _shape_of_a_row(shape: Any) -> Sequence[int]:
    """Set the dimensions to 1 that depend on the size of the batch: the first, and those unknown in a trace."""
    known_sizes = tf.get_static_value(tf.convert_to_tensor(shape, tf.int32), partial=True)
    row_shape = []
    for number, known_size in enumerate(known_sizes):
        row_shape.append(1 if number == 0 or known_size is None else int(known_size))
    return row_shape
