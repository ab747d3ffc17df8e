"""Random augmentation of batches. Random numbers depend on (seed, epoch, sample index), not on rank or batch.

TensorFlow's stateless operations take one seed per tensor; this generator takes a key per sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])

# AutoGraph's context outside of our functions, which disable it.
_OUTSIDE = tf.__internal__.autograph.control_status_ctx()


def graph_code(function: Function) -> Function:
    """Convert user-defined functions only: converting ours would slow the start by a tenth."""
    if getattr(function, "__module__", "").partition(".")[0] == __name__.partition(".")[0]:
        return tf.autograph.experimental.do_not_convert(function)
    return tf.__internal__.autograph.tf_convert(function, _OUTSIDE)


_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment (Steele, Lea and Flood, 2014)


@graph_code
def sample_keys(seed: int, epoch: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """Return a key for each sample in this epoch.

    Args:
        seed: the run's seed.
        epoch: int64 [].
        indices: sample numbers, int64 [n].

    Returns:
        uint64 [n].
    """
    run_key = _mix(tf.constant(seed, tf.uint64) + tf.constant(_GOLDEN_GAMMA, tf.uint64))
    epoch_key = _mix(run_key ^ _mix(tf.cast(epoch, tf.uint64) + tf.constant(1, tf.uint64)))
    return _mix(epoch_key + tf.cast(indices, tf.uint64) * tf.constant(_GOLDEN_GAMMA, tf.uint64))


@graph_code
def uniform(keys: tf.Tensor, draw: int, shape: tuple[int, ...] = ()) -> tf.Tensor:
    """Uniform numbers in [0, 1) for each sample.

    Args:
        keys: of ``sample_keys``, uint64 [n].
        draw: number of the draw; each gives independent values.
        shape: values per sample.

    Returns:
        float32 [n, *shape], multiples of 2**-24.
    """
    count = math.prod(shape)
    counters = tf.cast(tf.range(1, count + 1), tf.uint64) * tf.constant(_GOLDEN_GAMMA, tf.uint64)
    draw_keys = _mix(keys ^ tf.constant((draw + 1) * _GOLDEN_GAMMA % 2**64, tf.uint64))
    bits = tf.bitwise.right_shift(_mix(draw_keys[:, tf.newaxis] + counters), tf.constant(40, tf.uint64))  # [n, count]
    values = tf.cast(tf.cast(bits, tf.int64), tf.float32) * 2.0**-24
    return tf.reshape(values, tf.concat([tf.shape(keys), tf.constant(shape, tf.int32)], axis=0))


@graph_code
def random_shift(images: tf.Tensor, keys: tf.Tensor, max_pixels: int, *, draw: int = 0) -> tf.Tensor:
    """Shift each image by up to ``max_pixels`` in each direction, padded with zeros.

    Args:
        images: [n, h, w, c].
        keys: of ``sample_keys``, uint64 [n].
    """
    padding = [max_pixels, max_pixels]
    padded = tf.pad(images, [[0, 0], padding, padding, [0, 0]])
    return random_crop(padded, keys, images.shape[1], images.shape[2], draw=draw)


@graph_code
def random_crop(images: tf.Tensor, keys: tf.Tensor, height: int, width: int, *, draw: int = 0) -> tf.Tensor:
    """Crop a random window of each image.

    Args:
        images: [n, h, w, c].
        keys: of ``sample_keys``, uint64 [n].

    Returns:
        [n, height, width, c]

    Raises:
        ValueError: the window does not fit.
    """
    image_height, image_width = images.shape[1], images.shape[2]
    if height > image_height or width > image_width:
        raise ValueError(
            f"random_crop: a window of {height}x{width} does not fit into images of {image_height}x{image_width}; make "
            "it smaller, or pad the images first."
        )
    num_places = tf.constant([image_height - height + 1, image_width - width + 1], tf.float32)
    offsets = tf.cast(uniform(keys, draw, (2,)) * num_places, tf.int32)  # [n, 2]
    rows = offsets[:, :1] + tf.range(height)  # [n, height]
    columns = offsets[:, 1:] + tf.range(width)  # [n, width]
    return _gather_pixels(images, rows, columns)


@graph_code
def random_flip_left_right(images: tf.Tensor, keys: tf.Tensor, *, draw: int = 0) -> tf.Tensor:
    """Mirror each image [n, h, w, c] with probability 1/2."""
    height, width = images.shape[1], images.shape[2]
    columns = tf.range(width)
    columns = tf.where(uniform(keys, draw)[:, tf.newaxis] < 0.5, width - 1 - columns, columns)  # [n, w]
    return _gather_pixels(images, tf.range(height)[tf.newaxis], columns)


@graph_code
def random_brightness(images: tf.Tensor, keys: tf.Tensor, max_delta: float, *, draw: int = 0) -> tf.Tensor:
    """Add a random number in [-max_delta, max_delta) to each image [n, h, w, c].

    ``max_delta`` is in the unit of the values, such as 25 for integers from 0 to 255. Floats are not clipped. Integers
    are rounded, and clipped to the range of their type.
    """
    values = _to_float(images)
    deltas = _one_for_each(uniform(keys, draw) * (2 * max_delta) - max_delta, values)
    return _to_type_of(images, values + deltas)


@graph_code
def random_contrast(images: tf.Tensor, keys: tf.Tensor, lower: float, upper: float, *, draw: int = 0) -> tf.Tensor:
    """Scale each channel about its mean, like ``tf.image.adjust_contrast``, by one factor per image.

    Args:
        images: [n, h, w, c]; floats are not clipped, integers are rounded and clipped to the range of their type.
        keys: of ``sample_keys``, uint64 [n].
        lower, upper: the factor is in [lower, upper).
    """
    values = _to_float(images)
    factors = _one_for_each(uniform(keys, draw) * (upper - lower) + lower, values)
    means = tf.cast(_mean(images, axes=[1, 2]), values.dtype)  # [n, 1, 1, c]
    return _to_type_of(images, values * factors + (means - means * factors))


@graph_code
def per_image_standardization(images: tf.Tensor) -> tf.Tensor:
    """Give each image [n, h, w, c] mean 0 and standard deviation 1, like ``tf.image.per_image_standardization``.

    The deviation is at least 1/sqrt(h * w * c): images of one colour become 0. Integers become float32.
    """
    means = _mean(images, axes=[1, 2, 3])
    variances = _mean(tf.square(tf.cast(images, tf.float64) - means), axes=[1, 2, 3])
    num_values = images.shape[1] * images.shape[2] * images.shape[3]
    deviations = tf.sqrt(tf.maximum(variances, 1 / num_values))
    values = _to_float(images)
    standardized = (values - tf.cast(means, values.dtype)) / tf.cast(deviations, values.dtype)
    return _to_type_of(images, standardized) if images.dtype.is_floating else standardized


def _gather_pixels(images: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """-> [n, rows, columns, c]; one gather is faster than two."""
    height, width, channels = images.shape[1:]
    first_rows = tf.range(tf.shape(images)[0])[:, tf.newaxis] * height  # [n, 1]
    pixels = (first_rows + rows)[:, :, tf.newaxis] * width + columns[:, tf.newaxis, :]  # [n, rows, columns]
    return tf.gather(tf.reshape(images, [-1, channels]), pixels)


def _to_float(images: tf.Tensor) -> tf.Tensor:
    """Return float32 images, for the range and precision of the computation; float64 stays."""
    return images if images.dtype == tf.float64 else tf.cast(images, tf.float32)


def _to_type_of(images: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Cast back to the type of the images; integers are rounded and clipped to their range, floats are not."""
    if images.dtype.is_integer:
        return tf.saturate_cast(tf.round(values), images.dtype)
    return tf.cast(values, images.dtype)


def _one_for_each(values: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
    """[n] -> [n, 1, 1, 1]."""
    return tf.cast(values, images.dtype)[:, tf.newaxis, tf.newaxis, tf.newaxis]


def _mean(images: tf.Tensor, *, axes: list[int]) -> tf.Tensor:
    """In float64, since TensorFlow's order depends on the batch. Keeps ``axes``."""
    return tf.reduce_mean(tf.cast(images, tf.float64), axes, keepdims=True)


def _mix(values: tf.Tensor) -> tf.Tensor:
    """splitmix64's finaliser."""

    def xor_shifted(values: tf.Tensor, shift: int) -> tf.Tensor:
        return tf.bitwise.bitwise_xor(values, tf.bitwise.right_shift(values, tf.constant(shift, tf.uint64)))

    values = xor_shifted(values, 30) * tf.constant(0xBF58476D1CE4E5B9, tf.uint64)
    values = xor_shifted(values, 27) * tf.constant(0x94D049BB133111EB, tf.uint64)
    return xor_shifted(values, 31)
