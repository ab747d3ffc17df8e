"""Images with their labels as ``tf.train.Example`` messages, the records of TFRecord files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.errors import DataError


def make_example(features: dict[str, bytes | int]) -> bytes:
    """A serialised ``tf.train.Example`` of single values."""

    def feature(value: bytes | int) -> tf.train.Feature:
        if isinstance(value, bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))

    named = {name: feature(value) for name, value in features.items()}
    return tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString(deterministic=True)


def feature_spec() -> dict[str, Any]:
    """What is read of a record, with values for what it lacks."""
    texts = {name: tf.io.FixedLenFeature([], tf.string, b"") for name in ("image/encoded", "image/raw")}
    defaults = {"image/class/label": -1, "image/height": 0, "image/width": 0, "image/channels": 0}
    return texts | {name: tf.io.FixedLenFeature([], tf.int64, value) for name, value in defaults.items()}


def parse_features(records: list[Any], name_of: Callable[[int], str]) -> list[np.ndarray]:
    """Encoded image, raw image, label, height, width and channels of records, [n] each; ``name_of`` names one."""
    spec = feature_spec()
    with tf.device("CPU"):
        try:
            parsed = tf.io.parse_example(tf.constant(records, tf.string), spec)
        except tf.errors.InvalidArgumentError:
            for place, record in enumerate(records):
                try:
                    tf.io.parse_example(tf.constant([record]), spec)
                except tf.errors.InvalidArgumentError as error:
                    raise DataError(
                        f"{name_of(place)} is no tf.train.Example with the features {', '.join(spec)}, each of one "
                        f"value: {error.message}",
                        reach="node",
                    ) from error
            raise
    return [parsed[name].numpy() for name in spec]
