"""User-defined tf.data pipelines as streams, and the states of their iterators and of Grain's."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ringtrain.data.sources import PADDING_REMEDY, Feed, Pass, replay
from ringtrain.errors import DataError
from ringtrain.messages.defects import describe_defect
from ringtrain.messages.log import LOG
from ringtrain.runtime.private import (
    argument_of_dataset,
    dataset_of_iterator,
    has_argument,
    inputs_of_dataset,
    resource_of_iterator,
)

if TYPE_CHECKING:
    import tensorflow as tf

MAX_STATE_BYTES = 4 * 2**20  # of all ranks; large shuffle buffers are refilled instead
EVERY_STEPS = 50
MOST_READ_AHEAD = 16  # by a pipeline that tunes itself; rarely more
NUM_KEPT = 3  # pipelines run a few batches ahead of training
IteratorState = tuple[int, bytes]  # step, and the pipeline's state before it
NO_STATE: IteratorState = (0, b"")
TUNED_AHEAD = 2  # minimum of a self-tuning prefetch
# Prefixes of states: of tf.data with and without autotune thread, and what Grain gives.
TUNED, UNTUNED, AS_JSON, AS_BYTES = b"t", b"u", b"j", b"b"
FAILS_IF_STATEFUL = 2  # tf.data's policy: no state for pipelines with stateful operations


class IteratorStates:
    def __init__(self, feed: Feed, steps_per_pass: int, begin: IteratorState, *, rank: int, size: int) -> None:
        """``begin``: a state from a checkpoint, or NO_STATE."""
        self._read_state, self._steps_per_pass = feed.read_state, steps_per_pass
        self._limit = MAX_STATE_BYTES // (1 if feed.is_shared else size)
        self._is_off = feed.is_shared and rank != 0  # rank 0's state serves all ranks
        self._states = collections.deque([begin] if begin[1] and not self._is_off else [], NUM_KEPT)

    @property
    def are_kept(self) -> bool:
        """The same answer on all ranks."""
        return self._read_state is not None

    def note(self, step: int) -> None:
        """Save the state if due, before a step's batch is read."""
        # A shuffle that has read to its end, ahead of the steps, saves no seeds for the next passes (see _OneDataset).
        is_near_first_end = 0 <= self._steps_per_pass - step <= MOST_READ_AHEAD
        is_due = step % self._steps_per_pass == 0 or (step % EVERY_STEPS == 0 and not is_near_first_end)
        if self._read_state is None or self._is_off or not is_due:
            return
        state = self._read_state()
        if len(state) > self._limit:  # reading it would cost as much as producing many samples
            self._is_off = True
            self._states.clear()
        elif state:
            self._states.append((step, state))

    def before(self, step: int) -> IteratorState:
        return next((kept for kept in reversed(list(self._states)) if kept[0] <= step), NO_STATE)


class Current:
    def __init__(self) -> None:
        self._iterator: Any = None
        self._is_short = False

    def open(self, make: Callable[[], Any], skip: int, state: bytes, *, begins_anew: bool = True) -> Iterator[Any]:
        """Restore the state, or reread; ``begins_anew``: in the same order.

        Raises:
            DataError: the state is of another pipeline, and rereading is impossible.
        """
        self._begin(make(), state)
        if state:
            try:
                set_iterator_state(self._iterator, state)
                return self._iterator
            except Exception as error:  # for instance a Grain DataLoader whose source has no __repr__
                if not begins_anew:
                    raise DataError(
                        "the dataset cannot resume from where the checkpoint says that it was: "
                        f"{describe_defect(error)} Give the dataset that the run began with, its files where they "
                        "were, on the same TensorFlow, or start a new run from its weights: --resume never "
                        "--init_from RUN."
                    ) from error
                LOG.warning(
                    "the pipeline cannot resume from where the checkpoint says that it was, and makes its samples once "
                    f"more up to there: {describe_defect(error)}"
                )
                self._begin(make())
        return replay(self._iterator, skip)

    def _begin(self, batches: Any, state: bytes = b"") -> None:
        import tensorflow as tf

        self._is_short = True
        if isinstance(batches, tf.data.Dataset):
            self._is_short = buffered_bytes(batches) <= MAX_STATE_BYTES
            options = tf.data.Options()
            options.experimental_optimization.inject_prefetch = False  # its batches would be in the state
            batches = without_tuner(batches.with_options(options), state)
        self._iterator = iter(batches)

    def read_state(self) -> bytes:
        """Return an empty state if unsupported or too large for the memory."""
        return read_iterator_state(self._iterator) if self._is_short else b""


def without_tuner(dataset: Any, state: bytes = b"") -> Any:
    """Disable autotune if this rank has one core, unless it tunes parallel reads.

    Deleting an iterator joins the autotune thread with the GIL held. If the thread wakes before its cancellation is
    recorded (TensorFlow's CancellationManager), it sleeps up to a minute: on one core after most passes with 2.21. A
    ``state`` needs its own setting: names in the pipeline depend on it.
    """
    import tensorflow as tf

    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    is_alone = len(os.sched_getaffinity(0)) == 1
    asks_for_it = dataset.options().autotune.enabled or tunes_reads(dataset)
    if state.startswith(TUNED) if state else (asks_for_it or not is_alone):
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def tunes_reads(dataset: tf.data.Dataset) -> bool:
    calls = argument_of_dataset(dataset, "num_parallel_calls") if has_argument(dataset, "cycle_length") else None
    return (calls is not None and int(calls) < 0) or any(map(tunes_reads, inputs_of_dataset(dataset)))


def buffered_bytes(dataset: tf.data.Dataset) -> float:
    """Return infinity if unbounded."""
    inputs = inputs_of_dataset(dataset)
    file_name = argument_of_dataset(dataset, "filename")
    if file_name is not None and not file_name.numpy():
        return math.inf  # an in-memory cache is part of the state
    map_function = argument_of_dataset(dataset, "map_func")
    operations = map_function.function.graph.get_operations() if map_function else ()
    if any(operation.type.startswith(("ShuffleDataset", "CacheDataset")) for operation in operations):
        return math.inf  # per file, in interleave()
    num_bytes, length = 0.0, _buffer_length(dataset)
    if length is not None and _is_prefetch(dataset):  # usually small
        ahead = _bytes_of(inputs[0], max(TUNED_AHEAD, int(length)))
        num_bytes = ahead if math.isfinite(ahead) else 0.0
    elif length is not None:
        num_bytes = _bytes_of(inputs[0], int(length) if int(length) >= 0 else math.inf)  # below 0: everything
    return num_bytes + sum(map(buffered_bytes, inputs))


def count_ahead(dataset: tf.data.Dataset) -> int:
    """Return how many elements a pipeline may have read ahead."""
    is_tuned = dataset.options().autotune.enabled is not False  # then TensorFlow adds a prefetch
    return _count_ahead(dataset) + (MOST_READ_AHEAD if is_tuned else 0)


def _count_ahead(dataset: tf.data.Dataset) -> int:
    lengths = [
        argument_of_dataset(dataset, "num_parallel_calls"),
        _buffer_length(dataset) if _is_prefetch(dataset) else None,
    ]
    known = [int(length) for length in lengths if length is not None]
    mine = sum(length if length >= 0 else MOST_READ_AHEAD for length in known)
    return mine + sum(map(_count_ahead, inputs_of_dataset(dataset)))


def _buffer_length(dataset: tf.data.Dataset) -> Any:
    """Return that of a shuffle or a prefetch; readers of files have one in bytes."""
    return argument_of_dataset(dataset, "buffer_size") if has_argument(dataset, "input_dataset") else None


def _is_prefetch(dataset: tf.data.Dataset) -> bool:
    return has_argument(dataset, "buffer_size") and not has_argument(dataset, "seed")


def _bytes_of(dataset: tf.data.Dataset, elements: float) -> float:
    """Return the largest size; of in-memory data, such as file names, at most theirs."""
    import tensorflow as tf

    of_one, rows = 0.0, _batch_size(dataset)
    for part in tf.nest.flatten(dataset.element_spec):
        is_number = isinstance(part, tf.TensorSpec) and part.dtype not in (tf.string, tf.variant, tf.resource)
        is_known = is_number and part.shape.rank is not None and None not in part.shape[1:]
        of_one += math.prod(rows if n is None else n for n in part.shape) * part.dtype.size if is_known else math.inf
    tensors = argument_of_dataset(dataset, "tensors") or ()
    if not tensors or any(tensor.dtype == tf.variant for tensor in tensors):  # for example ragged
        return elements * of_one
    arrays = list(map(np.asarray, tensors))
    of_all = sum(sum(map(len, array.flat)) if array.dtype == object else array.nbytes for array in arrays)
    return min(elements * of_one, of_all)


def _batch_size(dataset: tf.data.Dataset) -> float:
    """Use the last ``batch()``, which shapes lack; infinity without one."""
    if (size := argument_of_dataset(dataset, "batch_size")) is not None:
        return int(size)
    return max(map(_batch_size, inputs_of_dataset(dataset)), default=math.inf)


def read_iterator_state(iterator: Any) -> bytes:
    """State with buffers; empty if unsupported, as it only saves time."""
    import tensorflow as tf

    if hasattr(iterator, "get_state"):
        with contextlib.suppress(Exception):
            state = iterator.get_state()  # a dict for Grain's datasets, bytes for DataLoaders
            return AS_BYTES + state if isinstance(state, bytes) else AS_JSON + json.dumps(state).encode()
        return b""
    try:
        state = tf.raw_ops.SerializeIterator(
            resource_handle=resource_of_iterator(iterator), external_state_policy=FAILS_IF_STATEFUL
        )
        is_tuned = dataset_of_iterator(iterator).options().autotune.enabled is not False
        return (TUNED if is_tuned else UNTUNED) + bytes(tf.io.serialize_tensor(state).numpy())
    except (AttributeError, tf.errors.OpError):
        return b""


def set_iterator_state(iterator: Any, state: bytes) -> None:
    """Raise AttributeError, OpError or anything of Grain's if incompatible."""
    import tensorflow as tf

    if state.startswith((AS_BYTES, AS_JSON)):
        iterator.set_state(state[1:] if state.startswith(AS_BYTES) else json.loads(state[1:]))
        return
    serialized = tf.io.parse_tensor(state[1:], tf.variant)
    tf.raw_ops.DeserializeIterator(resource_handle=resource_of_iterator(iterator), serialized=serialized)


def from_dataset(
    dataset: tf.data.Dataset | Callable[[Pass], tf.data.Dataset], *, steps_per_epoch: int | None = None
) -> Feed:
    """Train on a ``tf.data.Dataset``.

    **One dataset of samples** (not batches), the same on every rank. Every rank reads all samples and takes its slice
    of every ``--global_batch_size``: N ranks train exactly what one trains, and resume on any number of ranks.

    **A function of the epoch** that returns this rank's batches, sharded by ``of.rank`` and ``of.size``, shuffled by
    ``of.seed`` and ``of.epoch``, in batches of ``of.local_batch_size``. Batch sizes and numbers of steps may differ
    between ranks: each step is the exact mean over all its samples. Resume needs as many ranks.

    A resumed run restores tf.data's iterator state if it is small, else rereads the epoch, which must then be
    repeatable: a random ``map`` with ``num_parallel_calls`` is not; a ``shuffle`` in one dataset is, by the run's seed.

    With ``steps_per_epoch``, one dataset of infinite or unknown length continues from epoch to epoch and restarts at
    its end; with a known length each epoch has the first steps.

    Args:
        dataset: elements (x, y) of dense tensors, or tuples or dicts of them: samples in the first form, batches [n,
            ...] in the second.
        steps_per_epoch: default: the longest dataset of any rank; if unknown, as for files, one epoch of at most
            ``--steps``.
    """
    if callable(dataset):
        feed = feed_of(lambda of: _require_pairs(dataset(of)), _count, steps_per_epoch)
        return feed._replace(read_spec=lambda of: dataset(of).element_spec)
    one = _OneDataset(_require_pairs(dataset, are_samples=True), steps_per_epoch)
    has_end = steps_per_epoch is None or _count(dataset) not in (None, math.inf)
    return Feed(
        one.open_pass if has_end else one.resume_endless,
        steps_per_epoch,
        lambda of: _count(one.batches_of(of)),
        is_shared=True,
        read_state=one.current.read_state,
        goes_on=not has_end,
        read_spec=lambda of: one.batches_of(of).element_spec,
    )


class _OneDataset:
    def __init__(self, dataset: tf.data.Dataset, steps_per_epoch: int | None) -> None:
        self.current = Current()
        self._dataset, self._steps_per_epoch = dataset, steps_per_epoch or 0
        self._num_passes = 0
        self._endless: Iterator[Any] = iter(())
        self._position = -1  # in the endless batches

    def batches_of(self, of: Pass) -> tf.data.Dataset:
        return self._dataset.batch(of.global_batch_size)

    def open_pass(self, of: Pass, skip: int, state: bytes = b"") -> Iterator[tuple[Any, Any]]:
        # Each iterator draws the seeds of a shuffle. So does a restored one, once more.
        for _ in range(self._num_passes, of.epoch - bool(state)):
            iter(self.batches_of(of))
        self._num_passes = of.epoch + 1
        return self.current.open(lambda: self.batches_of(of), skip, state, begins_anew=False)

    def resume_endless(self, of: Pass, skip: int, state: bytes = b"") -> Iterator[tuple[Any, Any]]:
        """Continue a dataset without a known end."""
        wanted = of.epoch * self._steps_per_epoch + skip
        if self._position != wanted:
            self._endless = self.current.open(lambda: self.batches_of(of).repeat(), wanted, state, begins_anew=False)
            self._position = wanted
        return self._count(itertools.islice(self._endless, self._steps_per_epoch - skip))

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._position += 1
            yield batch


def feed_of(make: Callable[[Pass], Any], count: Callable[[Any], float | None], steps_per_epoch: int | None) -> Feed:
    """``make``: this rank's batches of a pass; ``count``: their number."""
    current = Current()

    def open_pass(of: Pass, skip: int, state: bytes = b"") -> Iterator[tuple[Any, Any]]:
        return current.open(lambda: make(of), skip, state)

    return Feed(open_pass, steps_per_epoch, lambda of: count(make(of)), read_state=current.read_state)


def _remedy_for(spec: Any) -> str:
    """Return what makes tensors of a RaggedTensorSpec or a SparseTensorSpec dense."""
    import tensorflow as tf

    if not isinstance(spec, tf.RaggedTensorSpec):
        return "Fill it up: map it by tf.sparse.to_dense()."
    if spec.ragged_rank:
        return f"Fill it up: map it by to_tensor(). Or fill up each batch. {PADDING_REMEDY}"
    # One row, which is dense within map().
    shape = f"[{', '.join(map(str, spec.shape))}]"
    as_row = f"samples.map(lambda x, y: (tf.ensure_shape(x, {shape}), y))"
    return f"Let it say so: {as_row}. {PADDING_REMEDY}"


def _count(batches: tf.data.Dataset) -> float | None:
    """Return None if unknown, infinity if it has no end."""
    import tensorflow as tf

    count = int(batches.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        return math.inf
    return count if count >= 0 else None


def _require_pairs(dataset: Any, *, are_samples: bool = False) -> tf.data.Dataset:
    import tensorflow as tf

    if not isinstance(dataset, tf.data.Dataset):
        raise DataError(
            f"from_dataset got a {type(dataset).__name__}; it must be a tf.data.Dataset, or a function of the pass "
            "that returns one. Give the dataset itself, or return it."
        )
    spec = dataset.element_spec
    if not (isinstance(spec, tuple) and len(spec) == 2):
        raise DataError(
            f"the elements of a dataset are {spec}; each must be a pair (x, y). Make them so, such as by "
            "dataset.map(lambda element: (element['image'], element['label'])); weights of samples go into y."
        )
    parts = tf.nest.flatten(spec)
    for part in parts:
        if not isinstance(part, tf.TensorSpec):
            remedy = _remedy_for(part)
            raise DataError(f"a dataset holds {part}; its tensors must be dense. {remedy}")
    if are_samples and all(part.shape.rank and part.shape[0] is None for part in parts):
        raise DataError(
            f"the elements of a dataset for all ranks are {spec}, which are batches; they must be samples, of which "
            "ringtrain makes batches. Leave batch() out, or add unbatch()."
        )
    return dataset
