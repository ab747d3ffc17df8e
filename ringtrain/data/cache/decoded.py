"""Source that stores decoded samples in arrays or mapped files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.data.augment import graph_code
from ringtrain.data.sources import FallibleSource
from ringtrain.errors import DataError


@dataclass(frozen=True)
class Layout:
    num_samples: int
    tensors: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]  # shape and type per sample, flat
    structure: Any  # (x, y) with any values

    @property
    def bytes_per_sample(self) -> int:
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.tensors)


def find_layout(source: FallibleSource) -> Layout:
    empty = tf.data.Dataset.from_tensors(tf.zeros([0], tf.int64))
    structure = empty.map(graph_code(source.gather)).element_spec
    specs = tf.nest.flatten(structure)
    for spec in specs:
        if not (isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[1:].is_fully_defined()):
            raise DataError(
                f"a source gives {spec}, which cannot be cached: each sample must have one shape. Use --cache none.",
                reach="run",
            )
    tensors = tuple((tuple(spec.shape[1:]), np.dtype(spec.dtype.as_numpy_dtype)) for spec in specs)
    return Layout(source.num_samples, tensors, structure)


class CachedSource:
    """Decodes missing samples, and stores them if the arrays are writable."""

    def __init__(
        self, source: FallibleSource, layout: Layout, is_kept: np.ndarray, arrays: Sequence[np.ndarray]
    ) -> None:
        """``is_kept`` [num_samples]: samples in the ``arrays`` [num_samples, ...]."""
        self.num_samples, self.fingerprint = source.num_samples, source.fingerprint
        self.damaged = getattr(source, "damaged", ())
        self.num_bytes = layout.num_samples * layout.bytes_per_sample
        self._source, self._layout, self._arrays, self._is_kept = source, layout, arrays, is_kept
        self._is_writable = all(array.flags.writeable for array in arrays)

    def gather(self, indices: tf.Tensor) -> tuple[Any, Any]:
        """Decode again what could not be decoded when the cache was filled."""
        if self._is_writable:
            indices = self._decode_missing(indices, lambda missing: (missing, *self._source.gather(missing)))
        if self._is_writable or self._is_kept.all():
            return self._read(indices)[1:]
        with tf.device("CPU"):
            has_all = tf.numpy_function(lambda places: self._is_kept[places].all(), [indices], tf.bool)
            has_all.set_shape([])
            return tf.cond(has_all, lambda: self._read(indices)[1:], lambda: self._source.gather(indices))

    def gather_good(self, indices: tf.Tensor) -> tuple[tf.Tensor, Any, Any]:
        return self._read(self._decode_missing(indices, self._source.gather_good) if self._is_writable else indices)

    def find_bad(self, indices: Iterable[int]) -> list[Any]:
        return self._source.find_bad([index for index in map(int, indices) if not self._is_kept[index]])

    def _decode_missing(self, indices: tf.Tensor, gather: Any) -> tf.Tensor:
        """Return ``indices``, when they are stored."""
        with tf.device("CPU"):
            missing = tf.numpy_function(lambda places: places[~self._is_kept[places]], [indices], tf.int64)
            missing.set_shape([None])

            def decode() -> tf.Tensor:
                found, x, y = gather(missing)
                return tf.numpy_function(self._store, [indices, found, *tf.nest.flatten((x, y))], tf.int64)

            stored = tf.cond(tf.size(missing) > 0, decode, lambda: tf.identity(indices))
            stored.set_shape(indices.shape)
            return stored

    def _store(self, indices: np.ndarray, found: np.ndarray, *values: np.ndarray) -> np.ndarray:
        for array, value in zip(self._arrays, values, strict=True):
            array[found] = value
        self._is_kept[found] = True
        return indices

    def _read(self, indices: tf.Tensor) -> tuple[tf.Tensor, Any, Any]:
        """Read by NumPy: TensorFlow's ImmutableConst reads a mapped file entirely into memory."""
        types = [tf.as_dtype(dtype) for _, dtype in self._layout.tensors]
        with tf.device("CPU"):
            found, *tensors = tf.numpy_function(self._read_kept, [indices], [tf.int64, *types])
        found.set_shape([None])
        for tensor, (shape, _) in zip(tensors, self._layout.tensors, strict=True):
            tensor.set_shape([None, *shape])
        return (found, *tf.nest.pack_sequence_as(self._layout.structure, tensors))

    def _read_kept(self, indices: np.ndarray) -> list[np.ndarray]:
        found = indices[self._is_kept[indices]]
        return [found, *(np.asarray(array[found]) for array in self._arrays)]
