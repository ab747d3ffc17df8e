"""Sources: indexed samples. A source says how many samples it has and gathers those that a rank asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ringtrain.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf


class Source(Protocol):
    """Samples by their number."""

    @property
    def num_samples(self) -> int:
        """How many samples there are."""

    def gather(self, indices: tf.Tensor) -> tuple[Any, Any]:
        """The samples ``indices`` (int64 [n]) as (x, y), tensors [n, ...] or structures of them; runs in a graph."""


@dataclass(frozen=True, eq=False)
class ArraySource:
    """Samples held in memory. Build one with ``from_arrays``."""

    x: Any
    y: Any

    num_samples: int

    def gather(self, indices: tf.Tensor) -> tuple[Any, Any]:
        import tensorflow as tf

        with tf.device("CPU"):
            return tf.nest.map_structure(lambda array: tf.gather(array, indices), (self.x, self.y))


def from_arrays(x: Any, y: Any) -> ArraySource:
    """A source of samples in memory.

    Args:
        x: the model's inputs: an array [n, ...], or a tuple or dict of such arrays.
        y: what the loss compares the outputs with, in the same form.

    Raises:
        DataError: no array at all, or arrays of different length.
    """
    import tensorflow as tf

    lengths = {len(array) for array in tf.nest.flatten((x, y)) if np.ndim(array)}
    if len(lengths) != 1 or any(np.ndim(array) == 0 for array in tf.nest.flatten((x, y))):
        shapes = ", ".join(str(np.shape(array)) for array in tf.nest.flatten((x, y)))
        raise DataError(
            f"the arrays of a source have the shapes {shapes}; the first dimension counts the samples and must be the "
            "same in all of them.",
        )
    with tf.device("CPU"):
        x, y = tf.nest.map_structure(tf.convert_to_tensor, (x, y))
    return ArraySource(x, y, num_samples=lengths.pop())
