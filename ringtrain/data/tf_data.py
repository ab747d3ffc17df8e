"""Pipelines of tf.data's that a user has already, as what each rank is fed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ringtrain.data.sources import Feed, Pass, replay
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf

PREFETCHED_BATCHES = 2


def from_dataset(
    dataset: tf.data.Dataset | Callable[[Pass], tf.data.Dataset], *, steps_per_epoch: int | None = None
) -> Feed:
    """Feed each rank by a ``tf.data.Dataset``.

    **One dataset of samples**, the same on every rank. Of every ``--global_batch_size`` samples each rank takes its
    slice, so that N ranks train exactly what one trains, also on another number of ranks, on which such a run may go
    on. Every rank reads all samples; where that takes longer than the training, shard the files in a function:

    **A function of the pass** that gives this rank's batches, sharded by ``pass.rank`` and ``pass.size``, shuffled by
    ``pass.seed`` and ``pass.epoch``, in batches of ``pass.local_batch_size``. Ranks may have batches of different sizes
    and end at different steps: each step is the exact mean over all its samples. On other numbers of ranks the samples
    of a step are others.

    A run that goes on replays the pass up to where it was. So a pass must always give the same. In the first form what
    the dataset draws, such as the order of ``shuffle``, follows the run's seed and the number of the pass by itself; in
    the second your function sees to it.

    Args:
        dataset: its elements are pairs (x, y) of dense tensors, or tuples or dicts of such: samples in the first form,
            batches [n, ...] in the second.
        steps_per_epoch: steps of a pass; by default as many as the dataset says that it has, on the rank with most.
            Where it does not know, there is one pass of at most ``--steps``.

    Raises:
        DataError: on every rank: it is none, has no pairs, or the ranks do not read the same samples.
    """
    if callable(dataset):
        return _from_function(dataset, steps_per_epoch)
    num_passes = 0  # that were opened

    def batches_of(of: Pass) -> tf.data.Dataset:
        return _require_pairs(dataset).batch(of.global_batch_size).prefetch(PREFETCHED_BATCHES)

    def open_pass(of: Pass, skip: int) -> Iterator[tuple[Any, Any]]:
        nonlocal num_passes
        while num_passes < of.epoch:  # a shuffle takes another order each time that it is begun
            iter(batches_of(of))
            num_passes += 1
        num_passes += 1
        return replay(iter(batches_of(of)), skip)

    return Feed(open_pass, steps_per_epoch, lambda of: _count(batches_of(of)), is_shared=True)


def _from_function(make: Callable[[Pass], tf.data.Dataset], steps_per_epoch: int | None) -> Feed:
    def open_pass(of: Pass, skip: int) -> Iterator[tuple[Any, Any]]:
        return replay(iter(_require_pairs(make(of)).prefetch(PREFETCHED_BATCHES)), skip)

    return Feed(open_pass, steps_per_epoch, lambda of: _count(_require_pairs(make(of))))


def _count(batches: tf.data.Dataset) -> int | None:
    """How many there are; None where that is not known, or they have no end."""
    count = int(batches.cardinality())
    return count if count >= 0 else None


def _require_pairs(dataset: Any) -> tf.data.Dataset:
    """See that it is a dataset of (x, y), dense."""
    import tensorflow as tf

    if not isinstance(dataset, tf.data.Dataset):
        raise DataError(
            f"from_dataset got a {type(dataset).__name__}; it must be a tf.data.Dataset. Return the dataset."
        )
    spec = dataset.element_spec
    if not (isinstance(spec, tuple) and len(spec) == 2):
        raise DataError(
            f"the elements of a dataset are {spec}; each must be a pair (x, y). Make them so, such as by "
            "dataset.map(lambda element: (element['image'], element['label']))."
        )
    for part in tf.nest.flatten(spec):
        if not isinstance(part, tf.TensorSpec):
            raise DataError(
                f"a dataset holds {part}; its tensors must be dense. Fill it up: map it by to_tensor() or "
                "tf.sparse.to_dense()."
            )
    return dataset
