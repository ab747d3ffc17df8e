"""Batch normalization over the global batch."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ringtrain.collectives.base import Collective
from ringtrain.collectives.differentiable import unique_name
from ringtrain.collectives.joined import ranks_for
from ringtrain.errors import UsageError


@keras.saving.register_keras_serializable(package="ringtrain")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization with the mean and the variance of the samples of all ranks.

    N ranks normalise, and learn, as one would with all their samples: local batches may be of different sizes, and
    empty. In training every rank must run the layer in every step, also one whose batch is empty. Takes the arguments
    of ``keras.layers.BatchNormalization``; ``fused=False``, of Keras 2, is accepted.
    """

    needs_every_rank = True

    def __init__(self, fused: bool | None = False, **options: Any) -> None:
        if fused is not False:
            raise UsageError(
                f"SyncBatchNormalization(fused={fused!r}): a fused operation cannot ask the other ranks. Leave it out."
            )
        super().__init__(**options)

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Mean and variance [channels] for each channel of ``inputs`` [n, ..., channels, ...], over all ranks."""
        collective = ranks_for(f"the layer {self.name!r}")
        weights = tf.ones([], inputs.dtype) if mask is None else _broadcast_mask(mask, inputs)
        count, mean, variance = global_moments(inputs, weights, self._reduction_axes, collective)
        has_samples = count > 0  # otherwise the moving statistics do not change
        return (
            tf.where(has_samples, mean, tf.cast(self.moving_mean, mean.dtype)),
            tf.where(has_samples, variance, tf.cast(self.moving_variance, variance.dtype)),
        )


def global_moments(
    inputs: tf.Tensor, weights: tf.Tensor, axes: list[int], collective: Collective | None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Count, mean and variance of each channel over the samples of all ranks, with exact gradients.

    Each rank's count, mean and sum of squared differences from it travel, and are merged by the formula of Chan, Golub
    and LeVeque (1983), which loses no digits where the mean is far from zero. The gradients of mean and variance with
    respect to a sample x of weight w are w/N and 2w(x - mean)/N; what they are multiplied by is summed over all ranks.

    ``inputs`` are [n, ..., channels, ...], where n may be 0; ``weights`` as these: 1 for what counts, 0 for what does
    not, or [], 1, if all do. ``axes`` are all but that of the channels.
    """
    name = unique_name("SyncBatchNormalization")

    @tf.custom_gradient
    def moments(x: tf.Tensor) -> Any:
        if weights.shape.rank:
            x = tf.where(weights > 0, x, tf.zeros([], x.dtype))  # what does not count may be anything, also NaN
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
                [factors] = collective.all_reduce([factors], name=f"{name}_gradient").tensors
            of_mean, of_variance = tf.unstack(tf.math.divide_no_nan(factors, count))
            differences = x - _spread(mean, x, axes)
            return weights * (_spread(of_mean, x, axes) + 2 * _spread(of_variance, x, axes) * differences)

        return (count, mean, variance), gradient

    return moments(inputs)


def _spread(values: tf.Tensor, like: tf.Tensor, axes: list[int]) -> tf.Tensor:
    """Values [channels] in a shape that goes with ``like`` [n, ..., channels, ...]."""
    return tf.reshape(values, [1 if axis in axes else -1 for axis in range(like.shape.rank)])


def _broadcast_mask(mask: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
    """A mask [n, ...] for each channel of ``inputs`` [n, ..., channels]."""
    return tf.broadcast_to(tf.cast(mask, inputs.dtype)[..., tf.newaxis], tf.shape(inputs))
