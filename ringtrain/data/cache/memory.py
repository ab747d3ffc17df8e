"""Decoded samples kept: decoded once for each node, or once for each rank, instead of once for each epoch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ringtrain.collectives import Collective, agree
from ringtrain.data.sources import FallibleSource, Source, is_fallible
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf

MEMORY_FILE = Path("/proc/meminfo")


def with_cache(
    source: Source,
    mode: Literal["none", "memory", "node"],
    collective: Collective,
    *,
    name: str,
    num_threads: int,
    reserved_bytes: int = 0,
) -> Source:
    """The source with a cache of its decoded samples; itself where it decodes nothing. Every rank must call it.

    Args:
        mode: ``"node"``: all samples are decoded now, by the ranks of each node together, into one file that they all
            map, and that later runs find. ``"memory"``: each rank keeps what it has decoded, which needs no disk, but
            as much memory for each rank: for a run of one rank.
        name: of the source, unique in the run.
        num_threads: processor threads for decoding.
        reserved_bytes: memory that this rank will need for what is cached already, and has not touched yet.

    Raises:
        DataError: there is not enough memory or space on the disk, or the ranks see different samples.
    """
    if mode == "none" or not is_fallible(source):
        return source
    if mode == "node":
        from ringtrain.data.cache.node import open_node_cache

        return open_node_cache(source, collective, name=name, num_threads=num_threads)
    layout = find_layout(source)
    local_size = collective.world.local_size
    agree(collective, lambda: check_memory(layout, local_size, reserved_bytes), name=f"cache/{name}/memory")
    return MemoryCachedSource(source, layout)


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


def read_arrays(arrays: Sequence[np.ndarray], indices: tf.Tensor, layout: Layout) -> Any:
    """(x, y) of the samples ``indices`` from arrays in memory, mapped or not; runs in a graph.

    By NumPy on the host: TensorFlow's own op for a mapped file, ImmutableConst, reads all of it into memory (seen).
    """
    import tensorflow as tf

    def read(places: np.ndarray) -> list[np.ndarray]:
        return [np.asarray(array[places]) for array in arrays]

    with tf.device("CPU"):
        return layout.pack(tf.numpy_function(read, [indices], [tf.as_dtype(dtype) for dtype in layout.dtypes]))
