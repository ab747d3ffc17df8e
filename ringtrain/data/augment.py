"""Random augmentation of whole batches, each sample by its own numbers.

What a sample gets depends on (seed, epoch, sample index) alone: not on the rank that reads it, nor on the batch that it
falls into. TensorFlow's stateless random operations take one seed for a whole tensor, so the numbers come from a
counter-based generator of our own that takes a key for each sample.
"""

from __future__ import annotations

import tensorflow as tf

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment (Steele, Lea and Flood, 2014)


def sample_keys(seed: int, epoch: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """A key for each sample in this epoch.

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


def uniform(keys: tf.Tensor, draw: int, shape: tuple[int, ...] = ()) -> tf.Tensor:
    """Uniform numbers in [0, 1) for each sample.

    Args:
        keys: of ``sample_keys``, uint64 [n].
        draw: which draw of this sample it is; another number gives independent values.
        shape: values per sample.

    Returns:
        float32 [n, *shape], multiples of 2**-24.
    """
    count = 1
    for extent in shape:
        count *= extent
    counters = tf.cast(tf.range(1, count + 1), tf.uint64) * tf.constant(_GOLDEN_GAMMA, tf.uint64)
    draw_keys = _mix(keys ^ tf.constant((draw + 1) * _GOLDEN_GAMMA % 2**64, tf.uint64))
    bits = tf.bitwise.right_shift(_mix(draw_keys[:, tf.newaxis] + counters), tf.constant(40, tf.uint64))  # [n, count]
    values = tf.cast(tf.cast(bits, tf.int64), tf.float32) * 2.0**-24
    return tf.reshape(values, tf.concat([tf.shape(keys), tf.constant(shape, tf.int32)], axis=0))


def random_shift(images: tf.Tensor, keys: tf.Tensor, max_pixels: int, *, draw: int = 0) -> tf.Tensor:
    """Shift each image by whole pixels, up to ``max_pixels`` each way; zeros come in at the edges.

    Args:
        images: [n, h, w, c].
        keys: of ``sample_keys``, uint64 [n].
    """
    height, width = images.shape[1], images.shape[2]
    padding = [max_pixels, max_pixels]
    padded = tf.pad(images, [[0, 0], padding, padding, [0, 0]])
    offsets = tf.cast(uniform(keys, draw, (2,)) * (2 * max_pixels + 1), tf.int32)  # [n, 2]
    rows = offsets[:, :1] + tf.range(height)  # [n, h]
    columns = offsets[:, 1:] + tf.range(width)  # [n, w]
    return tf.gather(tf.gather(padded, rows, batch_dims=1), columns, batch_dims=1, axis=2)


def _mix(values: tf.Tensor) -> tf.Tensor:
    """splitmix64's finaliser: every input bit reaches every output bit."""

    def xor_shifted(values: tf.Tensor, shift: int) -> tf.Tensor:
        return tf.bitwise.bitwise_xor(values, tf.bitwise.right_shift(values, tf.constant(shift, tf.uint64)))

    values = xor_shifted(values, 30) * tf.constant(0xBF58476D1CE4E5B9, tf.uint64)
    values = xor_shifted(values, 27) * tf.constant(0x94D049BB133111EB, tf.uint64)
    return xor_shifted(values, 31)
