"""What a step sends: the same messages from a rank that has samples and from one that has none."""

from collections.abc import Sequence
from typing import Any

import keras
import pytest
import tensorflow as tf

from ringtrain.collectives.base import Solo
from ringtrain.collectives.groups import ONE_MESSAGE_BYTES
from ringtrain.runtime.world import World
from tests.world.training import NUM_CLASSES, NUM_FEATURES, batches_of, create_step, dense_samples

ALONE = World(rank=0, size=1, local_rank=0, local_size=1, node="n1", launcher="no launcher")

Message = tuple[str, list[tuple[Any, str]]]


class Recording(Solo):
    """One process, whose messages are noted while they are traced."""

    def __init__(self, **facts: bool) -> None:
        super().__init__(ALONE)
        for name, value in {"sent": [], **facts}.items():
            object.__setattr__(self, name, value)

    def all_reduce(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        self.sent.append((name, [(tuple(tensor.shape), tensor.dtype.name) for tensor in tensors]))
        return list(tensors)

    sent: list[Message]


@tf.custom_gradient
def with_own_gradient(weights: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """The weights; TensorFlow does not know the shape of what Python makes of their gradient."""
    return tf.identity(weights), lambda upstream: tf.numpy_function(lambda array: array, [upstream], upstream.dtype)


class OwnGradient(keras.layers.Dense):
    """A dense layer with a gradient in Python."""

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        del training
        return inputs @ with_own_gradient(tf.convert_to_tensor(self.kernel))


def model_of(layer: Any, units: int) -> keras.Model:
    return keras.Sequential(
        [keras.Input((NUM_FEATURES,)), layer(units, use_bias=False), layer(NUM_CLASSES, use_bias=False)]
    )


def messages(layer: Any, units: int, collective: Recording) -> tuple[list[Message], list[Message]]:
    """Those of the step with samples, and those of the step without any."""
    spec = batches_of(dense_samples(8), collective, global_batch_size=4, steps=1).element_spec
    step = create_step(collective, lambda: model_of(layer, units), lambda: keras.optimizers.SGD(0.1), spec)
    with_samples = list(collective.sent)
    collective.sent.clear()
    step._join.get_concrete_function()
    return with_samples, list(collective.sent)


LARGE = ONE_MESSAGE_BYTES // 8 // NUM_FEATURES + 1  # units of float64 with which the first layer alone is as large


@pytest.mark.parametrize(
    ("layer", "units", "facts", "names"),
    [
        (keras.layers.Dense, 4, {}, ["gradients/0"]),
        (keras.layers.Dense, LARGE, {}, ["control", "gradients/0", "gradients/1"]),
        (OwnGradient, LARGE, {}, ["control", "gradients/0", "gradients/1"]),
        (OwnGradient, LARGE, {"overlaps_compute": False}, ["gradients/0"]),  # of any size, at once
    ],
)
def test_a_rank_without_samples_sends_the_same_messages(
    layer: Any, units: int, facts: dict[str, bool], names: list[str]
) -> None:
    with_samples, without = messages(layer, units, Recording(**facts))
    assert with_samples == without
    assert sorted(name for name, _ in with_samples) == names
