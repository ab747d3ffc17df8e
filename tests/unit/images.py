"""Images, keys and gathered samples for the tests of data and workloads."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.data.augment import sample_keys


def random_images(count: int) -> np.ndarray:
    """uint8 [count, 32, 32, 3]."""
    return np.random.default_rng(1).integers(0, 256, (count, 32, 32, 3), np.uint8)


def keys_of(count: int) -> tf.Tensor:
    """The keys of the first samples in the first epoch."""
    return sample_keys(0, tf.constant(0, tf.int64), tf.range(count, dtype=tf.int64))


def in_pipeline(gather: Callable[..., Any], indices: Iterable[int]) -> Any:
    """What a source gathers in the graph of a dataset, as the input pipeline asks it to."""
    [result] = tf.data.Dataset.from_tensors(tf.constant(list(indices), tf.int64)).map(gather).as_numpy_iterator()
    return result
