"""Decoded samples kept by each rank, in its memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringtrain.data.cache.layout import Layout, read_arrays
from ringtrain.data.sources import FallibleSource
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf

MEMORY_FILE = Path("/proc/meminfo")


def check_memory(layout: Layout, local_size: int, reserved_bytes: int) -> None:
    """See that all ranks of this node can keep all samples.

    Raises:
        DataError: they cannot.
    """
    needed = layout.num_samples * layout.bytes_per_sample * local_size
    available = available_memory() - reserved_bytes * local_size
    if needed > available:
        raise DataError(
            f"cache is 'memory', but {layout.num_samples:,} decoded samples for each of {local_size} ranks need "
            f"{needed:,} bytes, and this node has {available:,} bytes of memory available. Use --cache node, which "
            "keeps them once, in a file, or --cache none.",
            reach="node",
        )


def available_memory() -> int:
    """Bytes of memory that new allocations may take, by the kernel's estimate."""
    for line in MEMORY_FILE.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


class MemoryCachedSource:
    """A source that keeps what it has decoded in this process."""

    def __init__(self, source: FallibleSource, layout: Layout) -> None:
        self.num_samples, self.fingerprint = source.num_samples, source.fingerprint
        self.damaged = getattr(source, "damaged", ())
        self.num_bytes = layout.num_samples * layout.bytes_per_sample
        self._source, self._layout = source, layout
        self._is_kept = np.zeros(layout.num_samples, bool)
        # Not touched, these take no memory.
        self._arrays = [
            np.empty((layout.num_samples, *shape), dtype)
            for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
        ]

    def gather(self, indices: tf.Tensor) -> tuple[Any, Any]:
        """The samples ``indices`` as (x, y); fails as the source does where one cannot be decoded."""
        return self._read(self._keep(indices, lambda missing: (missing, *self._source.gather(missing))))

    def gather_good(self, indices: tf.Tensor) -> tuple[tf.Tensor, Any, Any]:
        """Those of the samples ``indices`` that can be decoded, in their order, as (indices, x, y)."""
        import tensorflow as tf

        kept = self._keep(indices, self._source.gather_good)
        is_kept = tf.numpy_function(lambda places: self._is_kept[places], [kept], tf.bool)
        is_kept.set_shape([None])
        found = kept[is_kept]
        return (found, *self._read(found))

    def find_bad(self, indices: Iterable[int]) -> list[Any]:
        """Those of the samples ``indices`` that cannot be decoded. Outside of graphs only."""
        return self._source.find_bad([index for index in map(int, indices) if not self._is_kept[index]])

    def _keep(self, indices: tf.Tensor, gather: Any) -> tf.Tensor:
        """The same indices, once those of the samples that were missing have been decoded and kept."""
        import tensorflow as tf

        with tf.device("CPU"):
            missing = tf.numpy_function(lambda places: places[~self._is_kept[places]], [indices], tf.int64)
            missing.set_shape([None])

            def decode() -> tf.Tensor:
                found, x, y = gather(missing)
                return tf.numpy_function(self._store, [indices, found, *tf.nest.flatten((x, y))], tf.int64)

            kept = tf.cond(tf.size(missing) > 0, decode, lambda: tf.identity(indices))
            kept.set_shape([None])
            return kept

    def _store(self, indices: np.ndarray, found: np.ndarray, *values: np.ndarray) -> np.ndarray:
        for array, value in zip(self._arrays, values, strict=True):
            array[found] = value
        self._is_kept[found] = True
        return indices

    def _read(self, indices: tf.Tensor) -> Any:
        return read_arrays(self._arrays, indices, self._layout)
