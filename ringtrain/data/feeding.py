"""Batches that each rank is fed on its own, by a user's generator or function."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, gather_objects
from ringtrain.data.augment import sample_keys
from ringtrain.data.order import FedOrder
from ringtrain.data.pipeline import PREFETCHED_BATCHES, Augment, Batch
from ringtrain.data.sources import Feed
from ringtrain.errors import DataError


class FedBatches(NamedTuple):
    """This rank's batches, and what went wrong in the code that feeds it: tf.data makes a text of any exception.

    Attributes:
        dataset: of ``Batch``, without the global counts, which are known once all ranks have said theirs. The indices
            count the samples that this rank was fed since the first step.
        failures: the exceptions that the feed raised.
    """

    dataset: tf.data.Dataset
    failures: list[Exception]

    def explain(self, error: Exception, step: int) -> Exception:
        """What went wrong, where it was in the feed."""
        del step
        return self.failures[0] if self.failures else error


def fed_batches(
    feed: Feed,
    order: FedOrder,
    collective: Collective,
    *,
    first_step: int,
    end_step: int,
    num_threads: int,
    augment: Augment | None = None,
) -> FedBatches:
    """This rank's batches from ``first_step`` up to, not including, ``end_step``, or until it has no more.

    Every rank must call this.

    Raises:
        DataError: on every rank, where some are fed batches of another kind than others, or none is fed anything.
    """
    world = collective.world
    steps = _open_steps(feed, order, rank=world.rank, size=world.size, first_step=first_step, end_step=end_step)
    first = next(steps, None)
    spec = _agree_on_spec(collective, first[2:] if first else None)

    failures: list[Exception] = []

    def read() -> Iterator[tuple[Any, ...]]:
        num_samples = 0
        try:
            for step, epoch, x, y in itertools.chain([first] if first else [], steps):
                count = _check(x, y, spec, rank=world.rank, step=step)
                indices = np.arange(num_samples, num_samples + count, dtype=np.int64)
                num_samples += count
                yield np.int64(step), np.int64(epoch), indices, x, y
        except Exception as error:
            failures.append(error)
            raise

    def to_batch(step: tf.Tensor, epoch: tf.Tensor, indices: tf.Tensor, x: Any, y: Any) -> Batch:
        if augment is not None:
            # Another rank's sample of the same number must not get the same.
            keys = sample_keys(order.seed, epoch, indices * world.size + world.rank)
            x, y = augment(x, y, keys)
        return Batch(x, y, indices, step, tf.zeros([], tf.int64))

    scalar = tf.TensorSpec([], tf.int64)
    fed = tf.data.Dataset.from_generator(
        read, output_signature=(scalar, scalar, tf.TensorSpec([None], tf.int64), *spec)
    )
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = num_threads
    return FedBatches(fed.map(to_batch).prefetch(PREFETCHED_BATCHES).with_options(options), failures)


def _open_steps(
    feed: Feed, order: FedOrder, *, rank: int, size: int, first_step: int, end_step: int
) -> Iterator[tuple[int, int, Any, Any]]:
    """(step, epoch, x, y) of one rank's steps; steps for which it is fed nothing are left out at the end of a pass."""
    step = first_step
    while step < end_step:
        epoch, skip = divmod(step, feed.steps_per_epoch) if feed.steps_per_epoch else (0, step)
        end = min(end_step, (epoch + 1) * feed.steps_per_epoch) if feed.steps_per_epoch else end_step
        for x, y in itertools.islice(feed.open_pass(rank, size, epoch, skip), end - step):
            yield step, epoch, x, y
            step += 1
        if not feed.steps_per_epoch:
            return
        step = end


def _check(x: Any, y: Any, spec: Any, *, rank: int, step: int) -> int:
    """The number of samples in a batch.

    Raises:
        DataError: it is none of the kind that the first batch was.
    """
    try:
        found = tf.nest.map_structure(_spec_of, (x, y))
        tf.nest.assert_same_structure(found, spec)
        fits = all(
            one.dtype == other.dtype and one.shape.is_compatible_with(other.shape)
            for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(spec), strict=True)
        )
    except (TypeError, ValueError):
        found, fits = (x, y), False
    lengths = {len(array) for array in tf.nest.flatten((x, y))} if fits else set()
    if len(lengths) != 1:
        raise DataError(
            f"rank {rank} was fed {_describe(found)} in step {step + 1}; each batch must have the first one's "
            f"structure, types and shapes, {_describe(spec)}, and one number of samples in all its arrays."
        )
    return lengths.pop()


def _spec_of(array: Any) -> tf.TensorSpec:
    """Type and shape of an array [n, ...], for any n."""
    value = np.asarray(array)
    return tf.TensorSpec([None, *value.shape[1:]], tf.as_dtype(value.dtype))


def _agree_on_spec(collective: Collective, first: tuple[Any, Any] | None) -> Any:
    """What a batch (x, y) looks like, from the first rank that has one.

    Raises:
        DataError: on every rank, where they differ, or no rank has a batch.
    """
    mine = None if first is None else _to_json(tf.nest.map_structure(_spec_of, tuple(first)))
    all_ranks = gather_objects(collective, mine, name="feed_spec")
    fed = [(rank, spec) for rank, spec in enumerate(all_ranks) if spec is not None]
    if not fed:
        raise DataError("no rank was fed a single batch. Look at the generator, or the function.", reach="run")
    _, expected = fed[0]
    for rank, spec in fed:
        if spec != expected:
            raise DataError(
                f"rank {fed[0][0]} is fed {_describe(_from_json(expected))}, but rank {rank} "
                f"{_describe(_from_json(spec))}; structure, types and shapes must be the same on every rank.",
                reach="run",
            )
    return _from_json(expected)


def _to_json(spec: Any) -> Any:
    """A structure of specs, in a form that travels."""
    if isinstance(spec, dict):
        return {"dict": {key: _to_json(spec[key]) for key in sorted(spec)}}
    if isinstance(spec, (tuple, list)):
        return {"tuple": [_to_json(item) for item in spec]}
    return {"dtype": spec.dtype.name, "shape": spec.shape.as_list()[1:]}


def _from_json(value: Any) -> Any:
    if "dict" in value:
        return {key: _from_json(item) for key, item in value["dict"].items()}
    if "tuple" in value:
        return tuple(_from_json(item) for item in value["tuple"])
    return tf.TensorSpec([None, *value["shape"]], tf.as_dtype(value["dtype"]))


def _describe(spec: Any) -> str:
    """A structure of specs in words, such as ``(float32 [n, 3], int64 [n])``."""
    return str(tf.nest.map_structure(_words, spec)).replace("'", "")


def _words(spec: Any) -> str:
    if not isinstance(spec, tf.TensorSpec):
        return type(spec).__name__
    return f"{spec.dtype.name} [{', '.join(['n', *map(str, spec.shape[1:])])}]"
