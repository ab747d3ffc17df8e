"""Batch normalization over the global batch."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ringtrain.collectives.base import Collective
from ringtrain.collectives.context import current_collective
from ringtrain.collectives.differentiable import unique_name
from ringtrain.errors import UsageError


@keras.saving.register_keras_serializable(package="ringtrain")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization with the mean and the variance of all ranks' samples.

    Local batches may differ in size, and be empty. In training every rank must run the layer in every step. Takes the
    arguments of ``keras.layers.BatchNormalization``, and ``fused=False`` of Keras 2.
    """

    needs_every_rank = True

    def __init__(self, fused: bool | None = False, **options: Any) -> None:
        if fused is not False:
            raise UsageError(
                f"SyncBatchNormalization(fused={fused!r}): a fused operation cannot ask the other ranks. Leave it out."
            )
        super().__init__(**options)

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Return [channels], [channels]."""
        collective = current_collective(f"the layer {self.name!r}")
        weights = tf.ones([], inputs.dtype) if mask is None else _broadcast_mask(mask, inputs)
        count, mean, variance = global_moments(inputs, weights, self._reduction_axes, collective)
        has_samples = count > 0  # else keep the moving statistics
        return (
            tf.where(has_samples, mean, tf.cast(self.moving_mean, mean.dtype)),
            tf.where(has_samples, variance, tf.cast(self.moving_variance, variance.dtype)),
        )


def global_moments(
    inputs: tf.Tensor, weights: tf.Tensor, axes: list[int], collective: Collective | None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return count, mean and variance per channel over all ranks, with exact gradients.

    Ranks merge count, mean and sum of squared differences (Chan, Golub and LeVeque 1983), stable for large means. For a
    sample x of weight w the gradients of mean and variance are w/N and 2w(x - mean)/N.

    ``inputs``: [n, ..., channels, ...], n may be 0; ``weights``: same shape, 1 or 0 (ignored), or [] if all count;
    ``axes``: all except the channels'.
    """
    name = unique_name("SyncBatchNormalization")

    @tf.custom_gradient
    def moments(x: tf.Tensor) -> Any:
        if weights.shape.rank:
            x = tf.where(weights > 0, x, tf.zeros([], x.dtype))  # they may be NaN
        local_sum = tf.reduce_sum(weights * x, axes)
        if weights.shape.rank:
            local_count = tf.reduce_sum(weights, axes)
        else:
            local_count = tf.fill(tf.shape(local_sum), tf.cast(tf.reduce_prod(tf.gather(tf.shape(x), axes)), x.dtype))
        local_mean = tf.math.divide_no_nan(local_sum, local_count)
        local_squares = tf.reduce_sum(weights * tf.square(x - _spread(local_mean, x, axes)), axes)
        statistics = tf.stack([local_count, local_mean, local_squares])[tf.newaxis]  # [1, 3, channels]
        if collective is not None:
            statistics = collective.all_gather(statistics, name=name)  # [ranks, 3, channels]
        counts, means, squares = tf.unstack(statistics, axis=1)
        count = tf.reduce_sum(counts, 0)
        mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), count)
        variance = tf.math.divide_no_nan(tf.reduce_sum(squares + counts * tf.square(means - mean), 0), count)

        def gradient(_: tf.Tensor, of_mean: tf.Tensor, of_variance: tf.Tensor) -> tf.Tensor:
            factors = tf.stack([of_mean, of_variance])
            if collective is not None:
                [factors] = collective.all_reduce([factors], name=f"{name}_gradient")
            of_mean, of_variance = tf.unstack(tf.math.divide_no_nan(factors, count))
            differences = x - _spread(mean, x, axes)
            return weights * (_spread(of_mean, x, axes) + 2 * _spread(of_variance, x, axes) * differences)

        return (count, mean, variance), gradient

    return moments(inputs)


def _spread(values: tf.Tensor, like: tf.Tensor, axes: list[int]) -> tf.Tensor:
    """[channels] -> shape that broadcasts with [n, ..., channels, ...]."""
    return tf.reshape(values, [1 if axis in axes else -1 for axis in range(like.shape.rank)])


def _broadcast_mask(mask: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
    """[n, ...] -> [n, ..., channels]."""
    return tf.broadcast_to(tf.cast(mask, inputs.dtype)[..., tf.newaxis], tf.shape(inputs))
