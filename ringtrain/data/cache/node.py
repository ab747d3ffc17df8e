"""Decoded samples in one file per node, mapped by all its ranks.

The ranks fill a temporary file together, then rename it; the name depends on the samples and mtimes.
Meanwhile local rank 0 holds a lock: the next run removes unlocked partial files, and files unused for a month. Runs
never wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object, raise_on_all_ranks
from ringtrain.data.augment import graph_code
from ringtrain.data.pipeline import in_own_threads
from ringtrain.data.sources import FallibleSource
from ringtrain.errors import DataError
from ringtrain.files import cache_directory
from ringtrain.files.bounded import open_regular
from ringtrain.runtime import activity
from ringtrain.runtime.world import World


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


ENDING = ".samples"
PART_ENDING = ".part"
UNUSED_SECONDS = 30 * 86400
UNUSED_SECONDS_WHERE_SPACE_LACKS = 86400
_FORMAT = 1
_HEADER_BYTES = 4096
_ALIGNMENT = 64
_CHUNK_BYTES = 32 << 20
_CHUNK_SAMPLES = 1024


def open_node_cache(source: FallibleSource, collective: Collective, *, name: str, num_threads: int) -> CachedSource:
    world, label = collective.world, f"cache/{name}"
    # Home directories may be shared by nodes.
    directory = cache_directory("decoded", world.node)
    file = CacheFile(directory, find_layout(source), f"{source.fingerprint} {getattr(source, 'changed', '')}")
    with contextlib.ExitStack() as stack:

        def begin() -> Filling | None:
            filling = file.begin(source) if world.local_rank == 0 else None
            if filling is not None:
                stack.callback(filling.close)
            return filling

        def fill() -> None:
            if part is not None:
                file.fill(Path(part), source, share_of(world, source.num_samples), num_threads)

        filling = raise_on_all_ranks(collective, begin, name=f"{label}/begin")
        mine = [world.node, world.local_rank, str(filling.path) if filling else None]
        ranks = all_gather_object(collective, mine, name=f"{label}/part")
        part = next(part for node, local_rank, part in ranks if (node, local_rank) == (world.node, 0))
        raise_on_all_ranks(collective, fill, name=f"{label}/fill")
        raise_on_all_ranks(collective, lambda: filling.finish() if filling else None, name=f"{label}/finish")
    return CachedSource(source, file.layout, *raise_on_all_ranks(collective, file.open, name=f"{label}/open"))


def share_of(world: World, num_samples: int) -> range:
    first, end = (num_samples * rank // world.local_size for rank in (world.local_rank, world.local_rank + 1))
    return range(first, end)


class CacheFile:
    """Header, state of each sample (1: decoded, 0: corrupt), and arrays."""

    def __init__(self, directory: Path, layout: Layout, fingerprint: str) -> None:
        self.layout = layout
        shapes = [[list(shape), dtype.str] for shape, dtype in layout.tensors]
        described = {"format": _FORMAT, "samples": layout.num_samples, "arrays": shapes, "fingerprint": fingerprint}
        self._header = json.dumps(described).encode().ljust(_HEADER_BYTES)
        self.path = directory / f"{hashlib.sha256(self._header).hexdigest()[:32]}{ENDING}"
        self._sections: list[tuple[int, tuple[int, ...], np.dtype[Any]]] = []
        place = _HEADER_BYTES
        for shape, dtype in (((), np.dtype(np.uint8)), *layout.tensors):
            self._sections.append((place, (layout.num_samples, *shape), dtype))
            place += -(-layout.num_samples * int(np.prod(shape)) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = place

    def is_whole(self) -> bool:
        try:
            with open_regular(self.path) as file:
                return os.fstat(file.fileno()).st_size == self.num_bytes and file.read(_HEADER_BYTES) == self._header
        except OSError:
            return False

    def begin(self, source: FallibleSource) -> Filling | None:
        """Return a file to fill, with allocated space; None if complete."""
        if self.is_whole():
            bad = np.flatnonzero(~self.open()[0])
            if len(source.find_bad(bad)) == len(bad):  # corrupt samples are tried again: a read may have failed once
                return None
        directory = self.path.parent
        with _saying_where(directory):
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.glob(f".*{PART_ENDING}"):  # of killed runs
                with contextlib.suppress(OSError), path.open("r+b") as file:  # BlockingIOError: in use
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            self._make_room(directory)
            filling = Filling(self.path)
            try:
                # If the disk filled up later, writes would raise SIGBUS.
                os.posix_fallocate(filling.descriptor, 0, self.num_bytes)
                os.pwrite(filling.descriptor, self._header, 0)
            except BaseException:
                filling.close()
                raise
            return filling

    def _make_room(self, directory: Path) -> None:
        used = {path: path.stat().st_mtime for path in directory.glob(f"*{ENDING}")}
        for path in sorted(used, key=lambda path: used[path]):
            lacks_space = shutil.disk_usage(directory).free < self.num_bytes
            if time.time() - used[path] > (UNUSED_SECONDS_WHERE_SPACE_LACKS if lacks_space else UNUSED_SECONDS):
                path.unlink(missing_ok=True)
        free = shutil.disk_usage(directory).free
        if self.num_bytes > free:
            raise DataError(
                f"the decoded samples need {self.num_bytes:,} bytes in {directory}, where {free:,} are free. "
                f"Remove what is not needed there (*{ENDING}), set XDG_CACHE_HOME to a larger disk, or use --cache "
                "none.",
                reach="node",
            )

    def fill(self, part: Path, source: FallibleSource, samples: range, num_threads: int) -> None:
        chunk = max(1, min(_CHUNK_SAMPLES, _CHUNK_BYTES // self.layout.bytes_per_sample))
        chunks = tf.data.Dataset.range(samples.start, samples.stop).batch(chunk).map(graph_code(source.gather_good))
        chunks = in_own_threads(chunks, num_threads, num_ahead=1)
        with _saying_where(part):
            is_good, *arrays = self._map(part, "r+")
            for found, x, y in chunks.as_numpy_iterator():
                for array, values in zip(arrays, tf.nest.flatten((x, y)), strict=True):
                    array[found] = values
                is_good[found] = 1
                activity.move()
            for array in (is_good, *arrays):
                array.flush()

    def open(self) -> tuple[np.ndarray, list[Any]]:
        """Return the mask of readable samples [num_samples], and the mapped arrays."""
        with _saying_where(self.path):
            with contextlib.suppress(PermissionError):  # another user's
                os.utime(self.path)  # marks it as used
            is_good, *arrays = self._map(self.path, "r")
            return np.array(is_good, bool), arrays

    def _map(self, path: Path, mode: Any) -> list[np.memmap[Any, Any]]:
        return [np.memmap(path, dtype, mode, offset=place, shape=shape) for place, shape, dtype in self._sections]


class Filling:
    """A temporary file that replaces its target when finished."""

    def __init__(self, target: Path) -> None:
        self._target = target
        while True:
            self.descriptor, name = tempfile.mkstemp(prefix=f".{target.stem}.", suffix=PART_ENDING, dir=target.parent)
            self.path = Path(name)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
            if os.fstat(self.descriptor).st_nlink:
                break
            os.close(self.descriptor)  # another run removed it before the lock

    def finish(self) -> None:
        with _saying_where(self._target):
            os.fsync(self.descriptor)
            os.replace(self.path, self._target)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


@contextlib.contextmanager
def _saying_where(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the cache of decoded samples {path} cannot be used: {error.strerror or error}. Check the place and its "
            "free space, set XDG_CACHE_HOME to another, or use --cache none.",
            reach="node",
        ) from error
