"""Digests of data in memory, and of parts of files.

Floating-point values may be rounded differently on other processors: weighted sums of blocks then show if rounding is
the only difference.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, Thread
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.data.formats.image_folder import IO_THREADS, ImageFolderSource
from ringtrain.data.formats.tfrecord import TFRecordSource
from ringtrain.data.sources import ArraySource
from ringtrain.errors import RingtrainError
from ringtrain.messages.defects import describe_defect
from ringtrain.runtime import activity

BLOCKS = 1024
MAX_COLUMNS = 64
COPIED_BYTES = 4 << 20  # slices with other than multiples of 64 bytes are copied
SHARED_BYTES = 64 << 20  # twice as fast as with small slices
SAMPLED_PIECES = 4096
PIECE_BYTES = 4096
GIVE_UP_SECONDS = 5.0
GOLDEN_RATIO = 0.6180339887498949

ROUNDING = {"float16": 2.0**-7, "bfloat16": 2.0**-4}
"""Rounding relative to the summed values; of other types:"""
COMMON_ROUNDING = 1e-5
ROUNDING_OF_ALL = 1e-7
"""The same, relative to most values of an array: for differences of two nearly equal values."""
ROUNDING_OF_SUMS = 1e-10


class Contents:
    """Digests of sources, computed in a thread while the model is created."""

    def __init__(self, sources: Mapping[str, Any]) -> None:
        # [n, ...] by names such as ``train x``
        self.arrays: dict[str, tf.Tensor] = {
            f"{name} {place}": array
            for name, source in sources.items()
            if isinstance(source, ArraySource)
            for place, array in source.arrays().items()
        }
        self._paths = {
            f"{name} file": source.paths
            for name, source in sources.items()
            if isinstance(source, (ImageFolderSource, TFRecordSource))
        }
        self._facts: Future[dict[str, list[str]]] = Future()
        self._is_unwanted = Event()
        self._thread = Thread(target=self._read, name="ringtrain-contents", daemon=True)
        self._thread.start()
        atexit.register(self._give_up)  # TensorFlow must not shut down while the thread computes

    def facts(self) -> dict[str, list[str]]:
        try:
            return self._facts.result()
        except Exception as error:
            raise RingtrainError(
                f"the data cannot be read to be compared among the ranks: {describe_defect(error)}"
            ) from error
        finally:
            atexit.unregister(self._give_up)

    def _read(self) -> None:
        try:
            arrays, paths = self.arrays.items(), self._paths.items()
            facts = {name: digest_blocks(each, block_size(len(each)), self._is_unwanted) for name, each in arrays}
            self._facts.set_result(facts | {name: sample_files(each) for name, each in paths})
        except Exception as error:
            self._facts.set_exception(error)

    def _give_up(self) -> None:
        self._is_unwanted.set()
        self._thread.join(GIVE_UP_SECONDS)


def block_size(num_samples: int) -> int:
    return max(1, -(-num_samples // BLOCKS))


def digest_blocks(array: tf.Tensor, size: int, is_unwanted: Event | None = None) -> list[str]:
    """Digest every ``size`` samples of [n, ...]; stop early if unwanted."""
    bytes_per_sample = array.shape[1:].num_elements() * array.dtype.size
    num_bytes = COPIED_BYTES if bytes_per_sample % 64 else SHARED_BYTES
    step = size * max(1, num_bytes // max(1, size * bytes_per_sample))
    digests: list[str] = []
    with tf.device("CPU"):
        for first in range(0, len(array), step):
            if is_unwanted is not None and is_unwanted.is_set():
                break
            some = array[first : first + step]
            whole = len(some) // size
            for part, num_blocks in ((some[: whole * size], whole), (some[whole * size :], 1)):
                if len(part):
                    blocks = tf.reshape(part, [num_blocks, part.shape.num_elements() // num_blocks])
                    digests += [row.tobytes().hex() for row in tf.fingerprint(blocks).numpy()]
            activity.move()
    return digests


# --- Sums tolerant to rounding ---


def sum_blocks(array: tf.Tensor, size: int) -> list[Any]:
    """Weighted sums of every ``size`` samples of a floating-point array [n, ...].

    Weights differ, so that sums depend on the order; they have both signs, so that rounding errors cancel. Each block
    gives [sums, scales], both [2, columns]: of finite values, and of positions of others. A column is one or more
    adjacent values; its scale is their Euclidean norm.
    """
    values = np.asarray(array).reshape(len(array), -1)
    values = values.view(values.real.dtype) if np.iscomplexobj(values) else values
    rows, columns = _weights(size), _weights(values.shape[1])
    starts = np.linspace(0, len(columns), min(len(columns), MAX_COLUMNS), endpoint=False).astype(np.int64)
    sums = []
    for first in range(0, len(values), size):
        block = values[first : first + size].astype(np.float64)
        is_finite = np.isfinite(block)
        others = np.zeros((1, block.shape[1]))
        if not is_finite.all():
            others = np.where(is_finite, 0.0, np.where(np.isnan(block), 1.0, np.where(block > 0, 2.0, 3.0)))
            block[~is_finite] = 0.0
        both = [_add_up(each, rows[: len(each)], columns, starts) for each in (block, others)]
        sums.append([list(each) for each in zip(*both, strict=True)])
        activity.move()
    return sums


def _add_up(block: np.ndarray, rows: np.ndarray, columns: np.ndarray, starts: np.ndarray) -> tuple[Any, Any]:
    """Weights [m] x [d]; columns begin at ``starts``."""
    peak = np.abs(block).max() or 1.0  # squares of large values overflow
    block = block / peak
    sums = np.add.reduceat(rows @ block * columns, starts)
    squares = np.add.reduceat(rows**2 @ block**2 * columns**2, starts)
    return (peak * sums).tolist(), (peak * np.sqrt(squares)).tolist()


def _weights(count: int) -> np.ndarray:
    """[count], 0.5 to 1.5 with either sign, the same in every process."""
    numbers = np.random.default_rng(0).uniform(-1, 1, count)
    return numbers + np.copysign(0.5, numbers)


def find_other_sums(first: Sequence[Any], second: Sequence[Any], dtype: str) -> list[int]:
    (sums, scales), (other_sums, other_scales) = (np.moveaxis(np.asarray(each), 1, 0) for each in (first, second))
    scale = np.maximum(scales, other_scales)  # [blocks, 2, columns]
    allowed = ROUNDING.get(dtype, COMMON_ROUNDING) * scale + ROUNDING_OF_ALL * np.median(scale[:, 0])
    allowed[:, 1] = ROUNDING_OF_SUMS * scale[:, 1]  # positions of NaN and infinity do not depend on rounding
    return [int(block) for block in np.flatnonzero(~(np.abs(sums - other_sums) <= allowed).all(axis=(1, 2)))]


# --- Files ---


def sample_files(paths: tf.Tensor) -> list[str]:
    """Digest at most 16 MiB, spread over all files."""
    count = min(len(paths), SAMPLED_PIECES)
    with tf.device("CPU"):
        chosen = tf.gather(paths, np.linspace(0, len(paths) - 1, count).astype(np.int64)).numpy()
    with ThreadPoolExecutor(IO_THREADS) as threads:
        return list(threads.map(lambda path, number: _sample_file(path, number, count), chosen, range(count)))


def _sample_file(path: bytes, number: int, count: int) -> str:
    activity.move()
    name = "/".join(os.fsdecode(path).split(os.sep)[-2:])
    num_pieces = SAMPLED_PIECES // count
    printed = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes <= num_pieces * PIECE_BYTES:
                printed.update(file.read())
            else:
                shift = number * GOLDEN_RATIO % 1  # a different offset in each file
                for piece in range(num_pieces):
                    offset = int((piece + shift) / num_pieces * (num_bytes - PIECE_BYTES))
                    printed.update(os.pread(file.fileno(), PIECE_BYTES, offset))
    except OSError as error:  # an error here is decided when the sample is read
        return f"{name} that cannot be read: {error.strerror}"
    return f"{name} of {num_bytes:,} bytes, digest {printed.hexdigest()[:12]}"
