"""Batches that each rank is fed on its own, by a user's generator, function or pipeline."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object, raise_on_all_ranks
from ringtrain.data.augment import sample_keys
from ringtrain.data.order import SampleOrder, StreamingOrder
from ringtrain.data.pipeline import (
    Augment,
    Batch,
    change,
    describe_structure,
    explain_change,
    in_own_threads,
    own_errors,
)
from ringtrain.data.places import NOWHERE, Place, Places
from ringtrain.data.sources import SAME_REMEDY, Feed, Pass, replay
from ringtrain.errors import DataError
from ringtrain.runtime.world import World

TELLING_SECONDS = 1.0  # a replay that takes longer is told, though a state has made it shorter
END = object()


def streaming_batches(
    feed: Feed,
    order: StreamingOrder,
    collective: Collective,
    *,
    first_step: int,
    end_step: int,
    num_threads: int,
    augment: Augment | None = None,
    print_line: Callable[[str], None] = lambda line: None,
    place: Place = NOWHERE,
) -> tuple[tf.data.Dataset, Callable[[Exception, int], Exception], Places]:
    """This rank's batches from ``first_step`` up to, not including, ``end_step``, or until it has no more.

    Every rank must call this. The dataset is of ``Batch``, without the global counts, which are known once all ranks
    have said theirs; the indices are the samples' places in the batch that this rank was fed, or, where all are fed
    alike, in the pass. Beside it stands what tells the error of a step: tf.data makes a text of the exceptions that the
    feed raised, and the places of this rank's pipeline. ``print_line`` shows a line to the user; ``place`` is one
    before ``first_step`` of a pipeline like this one.
    """
    world = collective.world
    places = Places(feed, order.steps_per_epoch, world.size)
    if not feed.goes_on and place[0] // order.steps_per_epoch != first_step // order.steps_per_epoch:
        place = NOWHERE  # of another pass
    if place[1]:
        places.keep(place)
    steps = _open_steps(feed, order, world, places, place, first_step=first_step, end_step=end_step)
    begin = time.monotonic()
    first = raise_on_all_ranks(collective, lambda: next(steps, None), name="feed")
    skipped, seconds = first_step if feed.goes_on else first_step % order.steps_per_epoch, time.monotonic() - begin
    if skipped and feed.replays and (not place[1] or seconds >= TELLING_SECONDS):
        what = "the pipeline was replayed up to" if feed.goes_on else "the pass was replayed up to its"
        print_line(f"{what} step {skipped:,}, in {seconds:.1f} s")
    shown = first[1:] if first else None
    if shown is None and first_step:  # the rank has had its last batch: what it looked like is known from the first
        before = next(feed.open_pass(_pass_of(order, world, 0), 0), None)
        shown = None if before is None else (_as_arrays(before[0]), _as_arrays(before[1]))
    spec = _agree_on_spec(collective, shown)
    _require_own_samples(feed, order, collective, shown, print_line)

    failures: list[Exception] = []

    def read() -> Iterator[tuple[Any, ...]]:
        try:
            for step, x, y in itertools.chain([first] if first else [], steps):
                numbers = np.arange(_check(x, y, spec, rank=world.rank, step=step))
                whole = len(numbers) if feed.is_shared else 0  # of all ranks, where that is known
                if feed.is_shared:
                    own = slice(*(len(numbers) * rank // world.size for rank in (world.rank, world.rank + 1)))
                    x, y = tf.nest.map_structure(lambda array, own=own: array[own], (x, y))
                    numbers = numbers[own] + step % order.steps_per_epoch * order.global_batch_size
                yield np.int64(step), np.int64(whole), numbers, x, y
        except Exception as error:
            failures.append(error)
            raise

    def to_batch(step: tf.Tensor, whole: tf.Tensor, indices: tf.Tensor, x: Any, y: Any) -> Batch:
        if augment is not None and feed.is_shared:  # the same for every number of ranks
            x, y = change(augment, x, y, sample_keys(order.seed, step // order.steps_per_epoch, indices))
        elif augment is not None:
            # From the step, so that a run that goes on gives the same; another rank's sample must not get the same.
            keys = sample_keys(order.seed, step, indices * world.size + world.rank)
            x, y = change(augment, x, y, keys)
        return Batch(x, y, indices, step, whole)

    scalar = tf.TensorSpec([], tf.int64)
    fed = tf.data.Dataset.from_generator(
        read, output_signature=(scalar, scalar, tf.TensorSpec([None], tf.int64), *spec)
    )

    def trace() -> tf.data.Dataset:
        with own_errors():
            return in_own_threads(fed.map(to_batch), num_threads)

    def explain(error: Exception, step: int) -> Exception:
        return failures[0] if failures else explain_change(error, step)

    return raise_on_all_ranks(collective, trace, name="fed batches"), explain, places


def pass_of(world: World, *, seed: int, global_batch_size: int, epoch: int) -> Pass:
    """A rank's pass over what it is fed."""
    begin, end = (global_batch_size * rank // world.size for rank in (world.rank, world.rank + 1))
    return Pass(world.rank, world.size, seed, epoch, max(1, end - begin), global_batch_size)


def with_steps_of_its_own(feed: Feed, collective: Collective, *, seed: int, global_batch_size: int) -> Feed:
    """The feed with the steps of a pass, where it can say them: those of the rank that has most."""
    of = pass_of(collective.world, seed=seed, global_batch_size=global_batch_size, epoch=0)
    mine = raise_on_all_ranks(collective, lambda: feed.count_steps(of), name="steps of a pass")
    counts = all_gather_object(collective, mine, name="steps of a pass")
    if feed.is_shared and len(set(counts)) > 1:
        raise DataError(
            f"the dataset has {', '.join(f'{count} batches on rank {rank}' for rank, count in enumerate(counts))}; it "
            f"must be the same on all ranks. {SAME_REMEDY}",
            reach="run",
        )
    if None in counts:
        return feed
    if not max(counts):
        raise DataError("the dataset holds no samples. Look at its files, and at what it leaves out.", reach="run")
    return feed._replace(steps_per_epoch=max(counts))


def _pass_of(order: SampleOrder, world: World, epoch: int) -> Pass:
    return pass_of(world, seed=order.seed, global_batch_size=order.global_batch_size, epoch=epoch)


def _open_steps(
    feed: Feed, order: StreamingOrder, world: World, places: Places, place: Place, *, first_step: int, end_step: int
) -> Iterator[tuple[int, Any, Any]]:
    """(step, x, y) of one rank's steps; steps for which it is fed nothing are left out at the end of a pass."""
    step, (known_step, state) = first_step, place
    while step < end_step:
        epoch, skip = divmod(step, feed.steps_per_epoch) if feed.steps_per_epoch else (0, step)
        end = min(end_step, (epoch + 1) * feed.steps_per_epoch) if feed.steps_per_epoch else end_step
        known = step - known_step if state else 0  # batches after the state, which are made once more
        batches = feed.open_pass(_pass_of(order, world, epoch), skip - known, *([state] if state else []))
        batches, state = replay(batches, known), b""
        while step < end:
            places.note(step)
            batch = next(batches, END)
            if batch is END:
                break
            if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
                kind = f"{len(batch)} values" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
                raise DataError(
                    f"rank {world.rank} was fed {kind} in step {step + 1}; each batch must be a pair (x, y)."
                )
            yield step, _as_arrays(batch[0]), _as_arrays(batch[1])
            step += 1
        if not feed.steps_per_epoch:
            return
        step = end


def _require_own_samples(
    feed: Feed, order: SampleOrder, collective: Collective, first: Any, print_line: Callable[[str], None]
) -> None:
    """See that all ranks read the same samples where each takes its slice of them, and others where it does not."""
    digests = all_gather_object(collective, _digest(first), name="first samples")
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if feed.is_shared and different:
        raise DataError(
            f"the dataset gives rank {different[0]} other samples than rank 0: the first {order.global_batch_size}, of "
            f"which each rank takes its slice, are not the same. {SAME_REMEDY}",
            reach="run",
        )
    if not (feed.is_shared or different) and len(digests) > 1:
        print_line(
            f"warning: all {len(digests)} ranks are fed the very same first batch, so that each sample counts "
            f"{len(digests)} times. Give each rank its own, by the rank and the size that your code is given."
        )


def _digest(samples: Any) -> str:
    """Of arrays, or structures of them."""
    digest = hashlib.blake2b(digest_size=16)
    for array in map(np.asarray, tf.nest.flatten(samples)):
        digest.update(repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _check(x: Any, y: Any, spec: Any, *, rank: int, step: int) -> int:
    """The number of samples in a batch, which must be of the first one's kind."""
    try:
        found = tf.nest.map_structure(_spec_of, (x, y))
        fits = all(tf.nest.flatten(tf.nest.map_structure(tf.TensorSpec.is_compatible_with, spec, found)))
    except (TypeError, ValueError):
        found, fits = (x, y), False
    lengths = {np.shape(array)[:1] for array in tf.nest.flatten((x, y))} if fits else set()
    if len(lengths) != 1 or () in lengths:
        raise DataError(
            f"rank {rank} was fed {describe_structure(found)} in step {step + 1}; each batch must have the first one's "
            f"structure, types and shapes, {describe_structure(spec)}, and one number of samples in all its arrays."
        )
    return int(lengths.pop()[0])


def _as_arrays(value: Any) -> Any:
    """A batch's x or y with every leaf an array: a list is one, a tuple and a dict are structures of arrays."""
    if isinstance(value, dict):
        return {key: _as_arrays(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_as_arrays(item) for item in value)
    return np.asarray(value)


def _spec_of(array: Any) -> tf.TensorSpec:
    """Type and shape of an array [n, ...], for any n; of a single number where it is one."""
    value = np.asarray(array)
    return tf.TensorSpec([None, *value.shape[1:]] if value.ndim else [], tf.as_dtype(value.dtype))


def _agree_on_spec(collective: Collective, first: tuple[Any, Any] | None) -> Any:
    """What a batch (x, y) looks like, from the first rank that has one; an error on every rank where they differ."""
    mine = None if first is None else _to_json(tf.nest.map_structure(_spec_of, tuple(first)))
    all_ranks = all_gather_object(collective, mine, name="feed_spec")
    fed = [(rank, spec) for rank, spec in enumerate(all_ranks) if spec is not None]
    if not fed:
        raise DataError("no rank was fed a single batch. Look at the generator, or the function.", reach="run")
    _, expected = fed[0]
    for rank, spec in fed:
        if spec != expected:
            raise DataError(
                f"rank {fed[0][0]} is fed {describe_structure(_from_json(expected))}, but rank {rank} "
                f"{describe_structure(_from_json(spec))}; structure, types and shapes must be the same on every rank.",
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
