"""Pipelines of tf.data's that a user has already, as what each rank is fed."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ringtrain.data.places import MAX_STATE_BYTES, warn_of_state
from ringtrain.data.sources import Feed, Pass, replay
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf

AHEAD = 2  # batches that are made while a step trains
FAILS_IF_STATEFUL = 2  # tf.data's policy: a pipeline with operations whose own state would be lost has none


class Current:
    """The iterator that was opened last."""

    def __init__(self) -> None:
        self._iterator: Any = None
        self._is_short = False

    def open(self, batches: tf.data.Dataset, skip: int, state: bytes) -> Iterator[Any]:
        """The batches after those to leave out, by the state there or by making them once more."""
        import tensorflow as tf

        self._iterator = iter(without_tuner(batches.prefetch(AHEAD)))
        self._is_short = buffered_bytes(batches) <= MAX_STATE_BYTES
        if state:
            try:
                set_iterator_state(self._iterator, state)
                return self._iterator
            except (AttributeError, tf.errors.OpError) as error:  # such as of files at another place
                warn_of_state(error)
        return replay(self._iterator, skip)

    def read_state(self) -> bytes:
        """Where it stands; empty where it cannot say, or not in short: to make a long state may take all memory."""
        return read_iterator_state(self._iterator) if self._is_short else b""


def without_tuner(dataset: Any) -> Any:
    """The dataset, where this rank has one core, without the thread that tunes it.

    There is nothing to be tuned on one core, but for how many files are waited for at once (an interleave's AUTOTUNE).
    Who lets go of an iterator ends that thread, and waits for it with Python's lock held. Where it is woken before its
    end is noted (TensorFlow's CancellationManager sets that last), as on the same core, it sleeps on for up to as long
    as the iterator has lived, or a minute: seen with 2.21 after most passes. A dataset that asks for it keeps it.
    """
    import tensorflow as tf

    is_alone = len(os.sched_getaffinity(0)) == 1
    if not (is_alone and isinstance(dataset, tf.data.Dataset)):
        return dataset
    if dataset.options().autotune.enabled or tunes_reads(dataset):
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def tunes_reads(dataset: tf.data.Dataset) -> bool:
    """Whether tf.data is to find out by itself how many datasets are read at once (files, mostly)."""
    calls = getattr(dataset, "_num_parallel_calls", None) if hasattr(dataset, "_cycle_length") else None
    return (calls is not None and int(calls) < 0) or any(map(tunes_reads, dataset._inputs()))


def buffered_bytes(dataset: tf.data.Dataset) -> float:
    """What a pipeline holds ready in buffers whose length it says, such as a shuffle's; infinite where nobody knows."""
    import tensorflow as tf

    length = getattr(dataset, "_buffer_size", None)
    elements = 0 if length is None else max(AHEAD, int(length))  # a prefetch of -1 finds its length itself
    num_bytes = 0.0
    for part in tf.nest.flatten(dataset.element_spec) if elements else ():
        is_number = isinstance(part, tf.TensorSpec) and (part.dtype.is_floating or part.dtype.is_integer)
        is_known = is_number and part.shape.rank is not None and None not in part.shape[1:]
        num_bytes += math.prod(extent or 1 for extent in part.shape) * part.dtype.size if is_known else math.inf
    return elements * num_bytes + sum(map(buffered_bytes, dataset._inputs()))


def read_iterator_state(iterator: Any) -> bytes:
    """Where an iterator of tf.data's stands, and what it has at hand; empty where it cannot say."""
    import tensorflow as tf

    try:
        state = tf.raw_ops.SerializeIterator(
            resource_handle=iterator._iterator_resource, external_state_policy=FAILS_IF_STATEFUL
        )
        return bytes(tf.io.serialize_tensor(state).numpy())
    except (AttributeError, tf.errors.OpError):
        return b""


def set_iterator_state(iterator: Any, state: bytes) -> None:
    """Let an iterator go on from where another of the same pipeline was; AttributeError or OpError where it cannot."""
    import tensorflow as tf

    serialized = tf.io.parse_tensor(state, tf.variant)
    tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=serialized)


def from_dataset(
    dataset: tf.data.Dataset | Callable[[Pass], tf.data.Dataset], *, steps_per_epoch: int | None = None
) -> Feed:
    """Feed each rank by a ``tf.data.Dataset``, to train on.

    **One dataset of samples** (not of batches), the same on every rank. Of every ``--global_batch_size`` samples each
    rank takes its slice, so that N ranks train exactly what one trains, also on another number of ranks, on which such
    a run may go on. Every rank reads all samples; where that takes longer than the training, shard the files in a
    function:

    **A function of the pass** that gives this rank's batches, sharded by ``of.rank`` and ``of.size``, shuffled by
    ``of.seed`` and ``of.epoch``, in batches of ``of.local_batch_size``. Ranks may have batches of different sizes and
    end at different steps: each step is the exact mean over all its samples. On other numbers of ranks the samples of a
    step are others, and a run that goes on on them is refused.

    A run that goes on goes on by tf.data's own state, where the pipeline has one and it is short (two batches that are
    ready, and no long buffer of a shuffle): in the first form on any number of ranks. Else it makes the samples of the
    pass once more, up to where it was, so a pass must always give the same. In the second form your function sees to
    it. In the first a ``shuffle`` follows the run's seed and takes another order in each pass, by itself; that holds
    where it is begun once in a pass, as where nothing repeats it. With ``steps_per_epoch``, a dataset without end
    (``repeat()``) or of unknown length goes on from epoch to epoch, and begins anew where it ends. What draws in
    parallel, such as a random ``map`` with ``num_parallel_calls``, gives something else each time.

    Args:
        dataset: its elements are pairs (x, y) of dense tensors, or tuples or dicts of such: samples in the first form,
            batches [n, ...] in the second.
        steps_per_epoch: steps of a pass; by default as many as the dataset says that it has, on the rank with most.
            Where it does not know, as of files, there is one pass of at most ``--steps``.
    """
    if callable(dataset):
        return _from_function(dataset, steps_per_epoch)
    num_passes = 0  # that were begun
    endless: Iterator[Any] = iter(())
    position = -1  # of what has no end, in batches
    current = Current()

    def batches_of(of: Pass) -> tf.data.Dataset:
        batches = _require_pairs(dataset, are_samples=True).batch(of.global_batch_size)
        # No further: what is ahead would begin a shuffle once more, or not, by chance.
        return batches if steps_per_epoch is None else batches.take(steps_per_epoch)

    def open_pass(of: Pass, skip: int, state: bytes = b"") -> Iterator[tuple[Any, Any]]:
        nonlocal num_passes
        while num_passes < of.epoch:  # a shuffle takes another order each time that it is begun
            iter(batches_of(of))
            num_passes += 1
        num_passes += 1
        return current.open(batches_of(of), skip, state)

    def go_on(of: Pass, skip: int, state: bytes = b"") -> Iterator[tuple[Any, Any]]:
        nonlocal endless, position
        wanted = of.epoch * (steps_per_epoch or 0) + skip
        if position != wanted:
            batches = _require_pairs(dataset, are_samples=True).batch(of.global_batch_size)
            has_no_end, position = _cardinality(dataset) == tf.data.INFINITE_CARDINALITY, wanted
            endless = current.open(batches, wanted, state) if has_no_end else replay(_again_and_again(batches), wanted)
        return count(itertools.islice(endless, (steps_per_epoch or 0) - skip))

    def count(batches: Iterator[Any]) -> Iterator[Any]:
        nonlocal position
        for batch in batches:
            position += 1
            yield batch

    import tensorflow as tf

    has_end = steps_per_epoch is None or _cardinality(dataset) >= 0
    return Feed(
        open_pass if has_end else go_on,
        steps_per_epoch,
        lambda of: _count(batches_of(of)),
        is_shared=True,
        read_state=current.read_state,
        goes_on=not has_end,
    )


def _from_function(make: Callable[[Pass], tf.data.Dataset], steps_per_epoch: int | None) -> Feed:
    current = Current()

    def open_pass(of: Pass, skip: int, state: bytes = b"") -> Iterator[tuple[Any, Any]]:
        return current.open(_require_pairs(make(of)), skip, state)

    return Feed(open_pass, steps_per_epoch, lambda of: _count(_require_pairs(make(of))), read_state=current.read_state)


def _again_and_again(batches: tf.data.Dataset) -> Iterator[Any]:
    """The batches, begun anew where they end; nothing where there are none."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in without_tuner(batches):
            is_empty = False
            yield batch


def _cardinality(dataset: Any) -> int:
    """As TensorFlow counts; below 0 where that is not known, or there is no end. What is no dataset is told later."""
    return int(dataset.cardinality()) if hasattr(dataset, "cardinality") else 0


def _count(batches: tf.data.Dataset) -> int | None:
    """How many there are; None where that is not known, or they have no end."""
    count = int(batches.cardinality())
    return count if count >= 0 else None


def _require_pairs(dataset: Any, *, are_samples: bool = False) -> tf.data.Dataset:
    """See that it is a dataset of (x, y), dense."""
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
            raise DataError(
                f"a dataset holds {part}; its tensors must be dense. Fill it up: map it by to_tensor() or "
                "tf.sparse.to_dense()."
            )
    if are_samples and all(part.shape.rank and part.shape[0] is None for part in parts):
        raise DataError(
            f"the elements of a dataset for all ranks are {spec}, which are batches; they must be samples, of which "
            "ringtrain makes batches. Leave batch() out, or add unbatch()."
        )
    return dataset
