"""Parallel decoding of images in a tf.data graph."""

from __future__ import annotations

import re
from collections.abc import Callable

import tensorflow as tf

from ringtrain.data.graph_code import graph_code

PARALLEL_DECODES = 16  # at most; limited by the input pipeline's threads


def decode_batch(
    decode: Callable[[tf.Tensor], tf.Tensor],
    encoded: tf.Tensor,
    indices: tf.Tensor,
    *,
    image_shape: tuple[int, int, int],
    skips_bad: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Decode images [n]; return their numbers [m] and uint8 [m, h, w, c], in order.

    Unlike tf.map_fn, a dataset can skip corrupt images, and is faster for small ones.
    """
    decoded = tf.data.Dataset.from_tensor_slices((indices, encoded)).map(
        graph_code(lambda index, image: (index, decode(image))), num_parallel_calls=PARALLEL_DECODES, deterministic=True
    )
    if skips_bad:
        decoded = decoded.ignore_errors()
    # An extra element, removed again: an empty batch has no shape.
    last = tf.data.Dataset.from_tensors((tf.constant(-1, tf.int64), tf.zeros(image_shape, tf.uint8)))
    batch = decoded.concatenate(last).batch(tf.size(indices, tf.int64) + 1)
    found, images = (tensor[:-1] for tensor in batch.get_single_element())
    return found, images


def decode_image(content: tf.Tensor, image_shape: tuple[int, int, int], *, is_resized: bool) -> tf.Tensor:
    """Decode JPEG or PNG to uint8 ``image_shape``; ``is_resized``: from its central square, with converted channels."""
    height, _, channels = image_shape
    # Detects and decodes PNG too.
    image = tf.io.decode_jpeg(content, channels=channels, dct_method="INTEGER_ACCURATE")
    return resize_middle(image, height) if is_resized else tf.ensure_shape(image, image_shape)


def resize_middle(image: tf.Tensor, size: int) -> tf.Tensor:
    """Resize the central square: uint8 [h, w, c] -> [size, size, c]."""
    height, width = tf.unstack(tf.shape(image)[:2])
    side = tf.minimum(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = image[top : top + side, left : left + side]
    resized = tf.image.resize(square, (size, size), method="bilinear", antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(resized), 0, 255), tf.uint8)


def reason_of(error: Exception) -> str:
    """Remove operation names from TensorFlow's message."""
    message = error.message if hasattr(error, "message") else str(error)
    return re.sub(r"\{\{.*?\}\}\s*|\s*\[Op:.*", "", message.splitlines()[0])
