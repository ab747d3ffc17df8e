"""How decoded samples lie in memory or in a file, and how they are read from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ringtrain.data.sources import FallibleSource
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True)
class Layout:
    """How decoded samples are laid out: one array for each tensor that the source gives.

    Attributes:
        shapes, dtypes: of each tensor of one sample, in the order of ``tf.nest.flatten((x, y))``.
        structure: (x, y) with any values.
    """

    num_samples: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]
    structure: Any

    @property
    def bytes_per_sample(self) -> int:
        """Bytes of one sample's tensors."""
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    def pack(self, tensors: Sequence[tf.Tensor]) -> Any:
        """(x, y) of flat tensors [n, ...], whose shapes become known."""
        import tensorflow as tf

        for tensor, shape in zip(tensors, self.shapes, strict=True):
            tensor.set_shape([None, *shape])
        return tf.nest.pack_sequence_as(self.structure, tensors)


def find_layout(source: FallibleSource) -> Layout:
    """What the samples of a source look like; none is read.

    Raises:
        DataError: they have no fixed shape.
    """
    import tensorflow as tf

    empty = tf.data.Dataset.from_tensors(tf.zeros([0], tf.int64))
    structure = empty.map(source.gather).element_spec
    specs = tf.nest.flatten(structure)
    for spec in specs:
        if not (isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[1:].is_fully_defined()):
            raise DataError(
                f"a source gives {spec}, which cannot be cached: each sample must have one shape. Use --cache none.",
                reach="run",
            )
    return Layout(
        source.num_samples,
        tuple(tuple(spec.shape[1:]) for spec in specs),
        tuple(np.dtype(spec.dtype.as_numpy_dtype) for spec in specs),
        structure,
    )


def read_arrays(arrays: Sequence[np.ndarray], indices: tf.Tensor, layout: Layout) -> Any:
    """(x, y) of the samples ``indices`` from arrays in memory, mapped or not; runs in a graph.

    By NumPy on the host: TensorFlow's own op for a mapped file, ImmutableConst, reads all of it into memory (seen).
    """
    import tensorflow as tf

    def read(places: np.ndarray) -> list[np.ndarray]:
        return [np.asarray(array[places]) for array in arrays]

    with tf.device("CPU"):
        return layout.pack(tf.numpy_function(read, [indices], [tf.as_dtype(dtype) for dtype in layout.dtypes]))
