"""Decoded samples in one file for each node, which all of its ranks map into their memory.

The ranks of a node fill it together before the training, each its share. It is filled under another name and renamed at
the end: under its own name, which is of the samples and of when their files last changed, it is whole. While it is
filled local rank 0 holds a lock on it, which the system frees when that process ends, however it ends: a part that
nobody holds is left over, and the next run removes it, like whole files that no run has opened for a month. Two runs
that start at once fill a file each; nobody waits for another run.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object, raise_on_all_ranks
from ringtrain.data.cache.decoded import CachedSource, Layout, find_layout
from ringtrain.data.graph_code import graph_code
from ringtrain.data.pipeline import in_own_threads
from ringtrain.data.sources import FallibleSource
from ringtrain.errors import DataError
from ringtrain.files import cache_directory
from ringtrain.files.bounded import open_regular
from ringtrain.runtime import activity
from ringtrain.runtime.world import World

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
    """The source with its samples in the node's file, which is filled first if it is missing: see ``with_cache``."""
    world, label = collective.world, f"cache/{name}"
    # With the node's name, since a home directory may be shared by nodes, and the ranks of one node fill a file.
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
    """The samples that a rank decodes for its node."""
    first, end = (num_samples * rank // world.local_size for rank in (world.local_rank, world.local_rank + 1))
    return range(first, end)


class CacheFile:
    """The file of some samples: a header, the state of each sample (1: decoded, 0: it could not be), and the arrays."""

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

    def is_current(self, source: FallibleSource) -> bool:
        """True if what could not be decoded when it was filled still cannot: a read may just have failed."""
        bad = np.flatnonzero(~self.open()[0])
        return len(source.find_bad(bad)) == len(bad)

    def begin(self, source: FallibleSource) -> Filling | None:
        """A file to fill, with all of its space; None if the whole one is there."""
        if self.is_whole() and self.is_current(source):
            return None
        directory = self.path.parent
        with _saying_where(directory):
            directory.mkdir(parents=True, exist_ok=True)
            _remove_left_over(directory)
            self._make_room(directory)
            filling = Filling(self.path)
            try:
                # A disk that fills up later kills with SIGBUS.
                os.posix_fallocate(filling.descriptor, 0, self.num_bytes)
                os.pwrite(filling.descriptor, self._header, 0)
            except BaseException:
                filling.close()
                raise
            return filling

    def _make_room(self, directory: Path) -> None:
        """Remove files that no run has opened for long, the longest unused first, and see that there is space."""
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
        """Decode samples and write them into their places in ``part``."""
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
        """The mask of readable samples [num_samples], and the mapped arrays."""
        with _saying_where(self.path):
            with contextlib.suppress(PermissionError):  # another user's
                os.utime(self.path)  # what is in use is not removed: see _make_room
            is_good, *arrays = self._map(self.path, "r")
            return np.array(is_good, bool), arrays

    def _map(self, path: Path, mode: Any) -> list[np.memmap[Any, Any]]:
        return [np.memmap(path, dtype, mode, offset=place, shape=shape) for place, shape, dtype in self._sections]


class Filling:
    """A file that is being filled for a place, and is there only once it is finished."""

    def __init__(self, target: Path) -> None:
        self._target = target
        while True:
            self.descriptor, name = tempfile.mkstemp(prefix=f".{target.stem}.", suffix=PART_ENDING, dir=target.parent)
            self.path = Path(name)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
            if os.fstat(self.descriptor).st_nlink:
                break
            os.close(self.descriptor)  # another run took it for left over before it was locked

    def finish(self) -> None:
        """Put it in its place, whole."""
        with _saying_where(self._target):
            os.fsync(self.descriptor)
            os.replace(self.path, self._target)

    def close(self) -> None:
        """Remove it, if it has not been finished, and free the lock."""
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


def _remove_left_over(directory: Path) -> None:
    """Remove what was being filled by processes that are gone."""
    for path in directory.glob(f".*{PART_ENDING}"):
        with contextlib.suppress(OSError), path.open("r+b") as file:  # BlockingIOError: somebody fills it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


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
