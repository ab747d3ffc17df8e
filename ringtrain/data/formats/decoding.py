"""Encoded images decoded in a tf.data graph, many at once."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from ringtrain.data.graph_code import graph_code

PARALLEL_DECODES = 16  # at most; the input pipeline's threads decide how many of a batch are decoded at once


def decode_batch(
    decode: Callable[[tf.Tensor], tf.Tensor],
    encoded: tf.Tensor,
    indices: tf.Tensor,
    *,
    image_shape: tuple[int, int, int],
    skips_bad: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Decode images [n] with their numbers in parallel: the numbers [m] and uint8 [m, h, w, c], in the same order.

    Those that cannot be decoded are left out (``skips_bad``), or are an error. By a dataset of their own, since
    tf.map_fn cannot pass over an image, and is slower for small ones.
    """
    decoded = tf.data.Dataset.from_tensor_slices((indices, encoded)).map(
        graph_code(lambda index, image: (index, decode(image))), num_parallel_calls=PARALLEL_DECODES, deterministic=True
    )
    if skips_bad:
        decoded = decoded.ignore_errors()
    # One element more, dropped again: a batch of no samples has no shape.
    last = tf.data.Dataset.from_tensors((tf.constant(-1, tf.int64), tf.zeros(image_shape, tf.uint8)))
    batch = decoded.concatenate(last).batch(tf.size(indices, tf.int64) + 1)
    found, images = (tensor[:-1] for tensor in batch.get_single_element())
    return found, images


def decode_image(content: tf.Tensor, image_shape: tuple[int, int, int], *, is_resized: bool) -> tf.Tensor:
    """One JPEG or PNG image, uint8 [h, w, c].

    Either its middle square is resized to ``image_shape``, a square, and its channels are converted, or it must have
    that shape.
    """
    height, _, channels = image_shape
    # Decodes PNG as well, and takes what it is from its first bytes.
    image = tf.io.decode_jpeg(content, channels=channels, dct_method="INTEGER_ACCURATE")
    return resize_middle(image, height) if is_resized else tf.ensure_shape(image, image_shape)


def resize_middle(image: tf.Tensor, size: int) -> tf.Tensor:
    """The largest square in the middle of an image uint8 [h, w, c], resized to [size, size, c]."""
    height, width = tf.unstack(tf.shape(image)[:2])
    side = tf.minimum(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = image[top : top + side, left : left + side]
    resized = tf.image.resize(square, (size, size), method="bilinear", antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(resized), 0, 255), tf.uint8)
