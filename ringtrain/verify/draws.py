"""Equal random draws for all world sizes.

A rank's random numbers depend on its rank, and on its number of samples. For the comparison, a draw has values that
differ only along its last dimension: so all samples of all ranks get the same ones.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from ringtrain.runtime.private import all_layers

SEED = 20
SMALLEST = 1e-7  # uniform number of which a logarithm is taken


class SharedDraws:
    """Replaces TensorFlow's random functions, which ``keras.random`` calls as well, in calls of a model or a loss.

    Attributes:
        places: layers that have drawn, or "the loss".
    """

    def __init__(self, model: keras.Model) -> None:
        self.places: list[str] = []
        self._layer_names = {layer.name for layer in all_layers(model)}
        self._num_draws = 0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``call`` with shared draws."""

        def call_with_shared_draws(*args: Any, **kwargs: Any) -> Any:
            self._num_draws = 0  # a call repeats the draws of the last one
            with self._sharing():
                return call(*args, **kwargs)

        return call_with_shared_draws

    @contextlib.contextmanager
    def _sharing(self) -> Iterator[None]:
        replacements = [
            (tf.random, "normal", self._normal),
            (tf.random, "stateless_normal", self._normal),
            (tf.random, "truncated_normal", self._truncated_normal),
            (tf.random, "stateless_truncated_normal", self._truncated_normal),
            (tf.random, "uniform", self._uniform),
            (tf.random, "stateless_uniform", self._uniform),
            (tf.random, "categorical", self._categorical),
            (tf.random, "stateless_categorical", self._categorical),
            (tf.nn, "dropout", self._dropout),
            (tf.nn.experimental, "stateless_dropout", self._dropout),
        ]
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in replacements:
                stack.enter_context(mock.patch.object(owner, name, replacement))
            yield

    def _next_seed(self) -> tf.Tensor:
        """Return the seed of the next draw in the call, and note its place."""
        place = "the loss"
        for scope in tf.get_current_name_scope().split("/"):
            for name in (re.sub(r"_\d+$", "", scope), scope):  # TensorFlow adds _1 to a repeated scope
                if name in self._layer_names:
                    place = name
        if place not in self.places:
            self.places.append(place)
        self._num_draws += 1
        return tf.constant([SEED, self._num_draws], tf.int32)

    def _draw(self, draw: Callable[..., tf.Tensor], shape: Any, **options: Any) -> tf.Tensor:
        """Draw along the last dimension of ``shape``, and repeat along the others."""
        seed = self._next_seed()
        whole_shape = tf.cast(tf.convert_to_tensor(shape), tf.int32)
        num_dimensions = whole_shape.shape[0]
        drawn_shape = whole_shape[-1:] if num_dimensions > 1 else whole_shape[:0]
        drawn = draw(drawn_shape, seed, **options)
        repeated = tf.broadcast_to(drawn, whole_shape)
        repeated.set_shape(tf.get_static_value(whole_shape, partial=True))
        return repeated

    def _normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: Any = tf.float32,
        seed: Any = None,
        **_: Any,
    ) -> tf.Tensor:
        drawn = self._draw(STATELESS_NORMAL, shape, dtype=dtype)
        return drawn * tf.cast(stddev, dtype) + tf.cast(mean, dtype)

    def _truncated_normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: Any = tf.float32,
        seed: Any = None,
        **_: Any,
    ) -> tf.Tensor:
        drawn = self._draw(STATELESS_TRUNCATED_NORMAL, shape, dtype=dtype)
        return drawn * tf.cast(stddev, dtype) + tf.cast(mean, dtype)

    def _uniform(
        self,
        shape: Any,
        minval: Any = 0,
        maxval: Any = None,
        dtype: Any = tf.float32,
        seed: Any = None,
        **_: Any,
    ) -> tf.Tensor:
        if tf.as_dtype(dtype).is_integer:
            return self._draw(STATELESS_UNIFORM, shape, minval=minval, maxval=maxval, dtype=dtype)
        drawn = self._draw(STATELESS_UNIFORM, shape, dtype=dtype)
        least = tf.cast(minval, dtype)
        most = tf.cast(1 if maxval is None else maxval, dtype)
        return least + drawn * (most - least)

    def _categorical(self, logits: Any, num_samples: int, dtype: Any = None, seed: Any = None, **_: Any) -> tf.Tensor:
        """Draw by the Gumbel-max trick; logits [n, classes] give [n, num_samples]."""
        logits = tf.convert_to_tensor(logits)
        num_classes = tf.shape(logits)[1]
        uniform = STATELESS_UNIFORM(
            tf.stack([num_samples, num_classes]), self._next_seed(), minval=SMALLEST, maxval=1.0, dtype=logits.dtype
        )
        gumbel = -tf.math.log(-tf.math.log(uniform))
        return tf.argmax(logits[:, None, :] + gumbel, axis=-1, output_type=dtype or tf.int64)

    def _dropout(self, x: Any, rate: Any, noise_shape: Any = None, seed: Any = None, **_: Any) -> tf.Tensor:
        x = tf.convert_to_tensor(x)
        shape = tf.shape(x) if noise_shape is None else noise_shape
        kept = self._uniform(shape, dtype=x.dtype) >= tf.cast(rate, x.dtype)
        return tf.where(kept, x / tf.cast(1 - rate, x.dtype), tf.zeros([], x.dtype))


def share_draws_of_loss(workload: Any, draws: SharedDraws) -> None:
    """Let loss and metrics of this instance of a workload have shared draws."""
    workload.loss = draws.wrap(workload.loss)
    workload.metrics = draws.wrap(workload.metrics)


# TensorFlow's own functions, which stay available while they are replaced.
STATELESS_NORMAL = tf.random.stateless_normal
STATELESS_TRUNCATED_NORMAL = tf.random.stateless_truncated_normal
STATELESS_UNIFORM = tf.random.stateless_uniform
