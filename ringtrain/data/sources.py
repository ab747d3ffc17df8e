"""Sources: indexable samples and streams."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ringtrain.errors import DataError
from ringtrain.messages.defects import describe_defect
from ringtrain.messages.rules import shorten
from ringtrain.runtime import activity

if TYPE_CHECKING:
    import tensorflow as tf


class Source(Protocol):
    """Indexable (map-style) samples."""

    @property
    def num_samples(self) -> int:
        """Number of samples."""

    def gather(self, indices: tf.Tensor) -> tuple[Any, Any]:
        """Return samples (x, y), tensors [n, ...] or structures of them; runs in a graph. ``indices``: int64 [n]."""


class UnreadableSample(NamedTuple):
    """A sample that cannot be read.

    Attributes:
        number: its index in the source.
        location: where it is, such as a path, or a record of a file.
        reason: the error, without a full stop.
        path: the file that holds it; empty if there is none.
    """

    number: int
    location: str
    reason: str
    path: str = ""


@dataclass(frozen=True, eq=False)
class ArraySource:
    x: Any
    y: Any

    num_samples: int

    def gather(self, indices: tf.Tensor) -> tuple[Any, Any]:
        import tensorflow as tf

        with tf.device("CPU"):
            return tf.nest.map_structure(lambda array: tf.gather(array, indices), (self.x, self.y))

    def arrays(self) -> dict[str, tf.Tensor]:
        """Return arrays [n, ...] by names ``x``, or ``x/image``."""
        import keras

        leaves = keras.tree.flatten_with_path({"x": self.x, "y": self.y})
        return {"/".join(map(str, path)): array for path, array in leaves}


def count_shapes(arrays: Sequence[Any]) -> str:
    """Return for example ``(10, 3), 20 times ()``."""
    counts = collections.Counter(str(np.shape(array)) for array in arrays)
    words = []
    for shape, count in counts.items():
        words.append(shape if count == 1 else f"{count} times {shape}")
    return shorten(", ".join(words))


def has_rows_of_different_lengths(value: Any) -> bool:
    """Return True if samples in a list, an array of objects or a RaggedTensor make no array.

    ``value`` may be a tuple or dict of them.
    """
    import tensorflow as tf

    if isinstance(value, Mapping):
        return any(map(has_rows_of_different_lengths, value.values()))
    if isinstance(value, tuple):
        return any(map(has_rows_of_different_lengths, value))
    if isinstance(value, tf.RaggedTensor):
        return True
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    if not isinstance(value, list):
        return False
    try:
        np.asarray(value)
    except ValueError:
        return True
    return False


def from_arrays(x: Any, y: Any) -> ArraySource:
    """Create a source of samples in memory.

    Args:
        x: the model's inputs: an array [n, ...], or a tuple or dict of arrays.
        y: the targets, in the same form.

    Raises:
        DataError: no array, different lengths, or ragged or sparse arrays.
    """
    import tensorflow as tf

    arrays = tf.nest.flatten((x, y))
    for array in arrays:
        if isinstance(array, tf.RaggedTensor):
            raise DataError(
                "the arrays of a source hold a RaggedTensor; they must be dense. Fill it up: array.to_tensor(). Or "
                f"fill up each batch. {PADDING_REMEDY}"
            )
        if isinstance(array, tf.SparseTensor):
            raise DataError(
                "the arrays of a source hold a SparseTensor; they must be dense. Fill it up: tf.sparse.to_dense(array)."
            )
    lengths = {len(array) for array in arrays if np.ndim(array)}
    if len(lengths) != 1 or not all(map(np.ndim, arrays)):
        remedy = "Of a list make one array: np.asarray(the_list)."
        if has_rows_of_different_lengths((x, y)):
            remedy = f"A list holds rows of different lengths, which make no array. {PADDING_REMEDY}"
        raise DataError(
            f"the arrays of a source have the shapes {count_shapes(arrays)}; the first dimension counts the samples "
            f"and must be the same in all of them. {remedy}"
        )
    try:
        with tf.device("CPU"):
            x, y = tf.nest.map_structure(tf.convert_to_tensor, (x, y))
    except (TypeError, ValueError) as error:  # arrays of objects or dates
        types = ", ".join(str(getattr(array, "dtype", type(array).__name__)) for array in arrays)
        remedy = "Give numbers, true or false, or texts, such as by array.astype('float32')."
        if has_rows_of_different_lengths((x, y)):
            remedy = f"An array of objects holds rows of different lengths. {PADDING_REMEDY}"
        raise DataError(
            f"the arrays of a source have the types {shorten(types)}, and TensorFlow cannot take them: "
            f"{describe_defect(error)} {remedy}"
        ) from error
    return ArraySource(x, y, num_samples=lengths.pop())


# padded_batch works on batches of a rank, so that a single dataset for all ranks cannot have it.
PADDING_REMEDY = (
    "Pad sequences, with samples a tf.data.Dataset of pairs (x, y): from_dataset(lambda of: "
    "samples.shard(of.size, of.rank).padded_batch(of.local_batch_size)), or bucket_by_sequence_length(...) in place "
    "of padded_batch, whose batches may differ in length (docs/data.md)."
)
# If ranks must read the same data but do not.
SAME_REMEDY = (
    "Let all ranks list the same files, in one order, and draw nothing in parallel; or give from_dataset a function, "
    "which reads what is the rank's own."
)


class Pass(NamedTuple):
    """One rank's pass over the samples.

    Attributes:
        rank: of this process.
        size: number of ranks.
        seed: of the run.
        epoch: number of the pass, from 0.
        local_batch_size: usual samples per step on this rank.
        global_batch_size: usual samples per step on all ranks.
    """

    rank: int
    size: int
    seed: int
    epoch: int
    local_batch_size: int
    global_batch_size: int


class Feed(NamedTuple):
    """Stream of batches from user code, made by a ``from_...`` function.

    Attributes:
        open_pass: (pass, batches to skip) -> this rank's batches (x, y); a third argument, from ``read_state``, avoids
            rereading.
        steps_per_epoch: steps of a pass; None: one pass, until no rank has a batch.
        count_steps: this rank's batches of a pass; None if unknown, infinity if it has no end.
        replays: skipped batches must be reread.
        is_shared: all ranks read the same batches, and slice them.
        read_state: state of the latest iterator; empty if unsupported.
        goes_on: the next pass continues the same iterator.
        has_no_end: a pass is known to be infinite.
        read_spec: types and shapes of the batches of a pass, as TensorSpecs with None for unknown dimensions, which may
            differ between batches; None if the batches of all steps have the shapes of the first one.
    """

    open_pass: Callable[..., Iterator[tuple[Any, Any]]]
    steps_per_epoch: int | None
    count_steps: Callable[[Pass], float | None] = lambda _: None
    replays: bool = True
    is_shared: bool = False
    read_state: Callable[[], bytes] | None = None
    goes_on: bool = False
    has_no_end: bool = False
    read_spec: Callable[[Pass], Any] = lambda _: None


def bytes_of(values: Any) -> bytes:
    """Bytes for a digest of an array, or of anything that makes one."""
    array = np.asarray(values)
    return repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).tobytes()


def from_generator(
    generate: Callable[[int, int], Iterator[tuple[Any, Any]]], *, steps_per_epoch: int | None = None
) -> Feed:
    """Stream each rank's own generator.

    Batch sizes and numbers of steps may differ between ranks: each step is the exact mean over all ranks' samples. A
    resumed run needs as many ranks, and replays the pass, which must be deterministic.

    Args:
        generate: (rank, size) -> iterator of batches (x, y): arrays [n, ...], or tuples or dicts of arrays; types and
            shapes, except n, are the same on every rank.
        steps_per_epoch: restart the generator after as many steps. Default: one pass, until no rank has a sample, or
            ``--steps``.
    """

    def open_pass(of: Pass, skip: int) -> Iterator[tuple[Any, Any]]:
        return replay(iter(generate(of.rank, of.size)), skip)

    return Feed(open_pass, steps_per_epoch)


def replay(batches: Iterator[Any], skip: int) -> Iterator[Any]:
    for _ in itertools.islice(batches, skip):
        activity.move()
    return batches


def from_callable(fetch: Callable[[int, int], tuple[Any, Any] | None], *, steps_per_epoch: int | None = None) -> Feed:
    """Stream each rank by a function of rank and step, from 0. See ``from_generator``.

    Args:
        fetch: (rank, step) -> this rank's batch (x, y), or None at the end. Steps continue across epochs.
        steps_per_epoch: steps of an epoch; default: the run is one epoch.
    """

    def open_pass(of: Pass, skip: int) -> Iterator[tuple[Any, Any]]:
        for step in itertools.count(of.epoch * (steps_per_epoch or 0) + skip):
            batch = fetch(of.rank, step)
            if batch is None:
                return
            yield batch

    return Feed(open_pass, steps_per_epoch, replays=False)
