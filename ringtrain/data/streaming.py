"""Streams: batches of each rank from user code."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object, raise_on_all_ranks
from ringtrain.data.augment import graph_code, sample_keys
from ringtrain.data.order import SampleOrder, StreamingOrder
from ringtrain.data.pipeline import (
    Augment,
    Batch,
    change,
    describe_structure,
    explain_change,
    has_structure_of,
    in_own_threads,
    own_errors,
)
from ringtrain.data.sources import PADDING_REMEDY, SAME_REMEDY, Feed, Pass, bytes_of, replay
from ringtrain.data.tf_data import NO_STATE, IteratorState, IteratorStates
from ringtrain.errors import DataError
from ringtrain.messages.defects import describe_defect
from ringtrain.messages.log import LOG
from ringtrain.runtime.world import World

PAIR_REMEDY = "Weights of samples go into y, such as {'label': ..., 'weight': ...}, and the workload's loss uses them."
SIGNS_OF_LENGTHS = ("Cannot batch tensors with different shapes", "Cannot add tensor to the batch")
TELLING_SECONDS = 1.0  # replays longer than this are reported even with a saved state
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
    place: IteratorState = NO_STATE,
) -> tuple[tf.data.Dataset, Callable[[Exception, int], Exception], IteratorStates]:
    """Open this rank's batches; ``end_step`` is exclusive. Collective.

    Returns a dataset of ``Batch`` without global counts, a function that finds original exceptions (tf.data converts
    them to text), and the pipeline's checkpoints. Indices are positions in the batch or, for shared data, the pass.
    ``place``: a checkpoint before ``first_step``.
    """
    world = collective.world
    if not feed.goes_on and place[0] // order.steps_per_epoch != first_step // order.steps_per_epoch:
        place = NO_STATE  # of another pass
    places = IteratorStates(feed, order.steps_per_epoch, place, rank=world.rank, size=world.size)
    steps = _open_steps(feed, order, world, places, place, first_step=first_step, end_step=end_step)
    begin = time.monotonic()
    first = raise_on_all_ranks(collective, lambda: next(steps, None), name="feed")
    skipped, seconds = first_step if feed.goes_on else first_step % order.steps_per_epoch, time.monotonic() - begin
    if skipped and feed.replays and (not place[1] or seconds >= TELLING_SECONDS):
        what = "the pipeline was replayed up to" if feed.goes_on else "the pass was replayed up to its"
        LOG.info(f"{what} step {skipped:,}, in {seconds:.1f} s")
    shown = first[1:] if first else None
    if shown is None and first_step:  # this rank has no more batches: use its first for the spec
        before = next(feed.open_pass(_pass_of(order, world, 0), 0), None)
        shown = None if before is None else (as_arrays(before[0]), as_arrays(before[1]))
    first_pass = _pass_of(order, world, 0)
    spec = raise_on_all_ranks(collective, lambda: feed.read_spec(first_pass), name="element spec")
    form = agree_on_form(collective, shown, spec)
    _require_own_samples(feed, order, collective, shown)
    reader = _Reader(order, world, form, itertools.chain([first] if first else [], steps), augment)

    def trace() -> tf.data.Dataset:
        with own_errors():
            return in_own_threads(reader.to_dataset(), num_threads)

    return raise_on_all_ranks(collective, trace, name="fed batches"), reader.explain, places


class _Reader:
    def __init__(
        self,
        order: StreamingOrder,
        world: World,
        form: Form,
        steps: Iterator[tuple[int, Any, Any]],
        augment: Augment | None,
    ) -> None:
        self._order, self._world, self._form, self._steps, self._augment = order, world, form, steps, augment
        self._failures: list[Exception] = []

    def to_dataset(self) -> tf.data.Dataset:
        """Avoid from_generator, which converts, compares and copies in Python: too slow for small steps."""
        scalar = tf.TensorSpec([], tf.int64)
        specs = [tf.TensorSpec([], tf.bool), scalar, scalar, tf.TensorSpec([None], tf.int64), *self._form.specs]

        def read(_: tf.Tensor) -> tuple[tf.Tensor, ...]:
            tensors = tf.numpy_function(self._read, [], [spec.dtype for spec in specs])
            return tuple(tf.ensure_shape(tensor, spec.shape) for tensor, spec in zip(tensors, specs, strict=True))

        steps = tf.data.Dataset.counter().map(graph_code(read)).take_while(graph_code(lambda is_there, *_: is_there))
        return steps.map(graph_code(self._to_batch))

    def explain(self, error: Exception, step: int) -> Exception:
        """Return the stream's original exception, if any."""
        return self._failures[0] if self._failures else explain_change(error, step)

    def _read(self) -> list[Any]:
        """Return: has a step, step, samples of all ranks if known, this rank's."""
        world, order = self._world, self._order
        try:
            fed = next(self._steps, None)
            if fed is None:
                return [False, np.int64(0), np.int64(0), np.zeros(0, np.int64), *self._form.nothing]
            step, x, y = fed
            numbers, leaves = self._form.look(x, y, rank=world.rank, step=step)
            if not order.is_shared:
                return [True, np.int64(step), np.int64(0), numbers, *leaves]
            own = slice(*(len(numbers) * rank // world.size for rank in (world.rank, world.rank + 1)))
            indices = numbers[own] + step % order.steps_per_epoch * order.global_batch_size
            return [True, np.int64(step), np.int64(len(numbers)), indices, *(leaf[own] for leaf in leaves)]
        except Exception as error:
            self._failures.append(error)
            raise

    def _to_batch(
        self, _: tf.Tensor, step: tf.Tensor, whole: tf.Tensor, indices: tf.Tensor, *leaves: tf.Tensor
    ) -> Batch:
        order, world = self._order, self._world
        x, y = tf.nest.pack_sequence_as(self._form.spec, list(leaves))
        if self._augment is not None:
            epoch = step // order.steps_per_epoch
            # Shared data: the same for any number of ranks. Else by rank, and by step, so that a resume gives the same.
            when, numbers = (epoch, indices) if order.is_shared else (step, indices * world.size + world.rank)
            x, y = change(self._augment, x, y, sample_keys(order.seed, when, numbers))
        return Batch(x, y, indices, step, whole)


def pass_of(world: World, *, seed: int, global_batch_size: int, epoch: int = 0) -> Pass:
    begin, end = (global_batch_size * rank // world.size for rank in (world.rank, world.rank + 1))
    return Pass(world.rank, world.size, seed, epoch, max(1, end - begin), global_batch_size)


def with_steps_of_its_own(feed: Feed, collective: Collective, *, seed: int, global_batch_size: int) -> Feed:
    """Use the largest count of any rank, if known. Collective."""
    of = pass_of(collective.world, seed=seed, global_batch_size=global_batch_size)
    mine = raise_on_all_ranks(collective, lambda: feed.count_steps(of), name="steps of a pass")
    counts = all_gather_object(collective, mine, name="steps of a pass")
    if feed.is_shared and len(set(counts)) > 1:
        raise DataError(
            f"the dataset has {', '.join(f'{count} batches on rank {rank}' for rank, count in enumerate(counts))}; it "
            f"must be the same on all ranks. {SAME_REMEDY}",
            reach="run",
        )
    if math.inf in counts:
        return feed._replace(has_no_end=True)
    if None in counts:
        return feed
    if not max(counts):
        raise DataError("the dataset holds no samples. Look at its files, and at what it leaves out.", reach="run")
    return feed._replace(steps_per_epoch=max(counts))


def _pass_of(order: SampleOrder, world: World, epoch: int) -> Pass:
    return pass_of(world, seed=order.seed, global_batch_size=order.global_batch_size, epoch=epoch)


def _open_steps(
    feed: Feed,
    order: StreamingOrder,
    world: World,
    places: IteratorStates,
    place: IteratorState,
    *,
    first_step: int,
    end_step: int,
) -> Iterator[tuple[int, Any, Any]]:
    """Yield (step, x, y), without steps that lack data."""
    step, (known_step, state) = first_step, place
    while step < end_step:
        epoch, skip = divmod(step, feed.steps_per_epoch) if feed.steps_per_epoch else (0, step)
        end = min(end_step, (epoch + 1) * feed.steps_per_epoch) if feed.steps_per_epoch else end_step
        known = step - known_step if state else 0  # batches after the state, to reread
        batches = feed.open_pass(_pass_of(order, world, epoch), skip - known, *([state] if state else []))
        batches, state = replay(batches, known), b""
        while step < end:
            places.note(step)
            with explaining_lengths(f"rank {world.rank}", step):
                batch = next(batches, END)
            if batch is END:
                break
            if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
                kind = f"{len(batch)} values" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
                raise DataError(
                    f"rank {world.rank} was fed {kind} in step {step + 1}; each batch must be a pair (x, y). "
                    f"{PAIR_REMEDY}"
                )
            try:
                x, y = as_arrays(batch[0]), as_arrays(batch[1])
            except ValueError as error:
                raise DataError(
                    f"rank {world.rank} was fed a list in step {step + 1} that makes no array: "
                    f"{describe_defect(error)} Make its rows equally long. {PADDING_REMEDY}"
                ) from error
            yield step, x, y
            step += 1
        if not feed.steps_per_epoch:
            return
        step = end


def _require_own_samples(feed: Feed, order: SampleOrder, collective: Collective, first: Any) -> None:
    """Check that ranks read the same samples if they slice them, else different ones. Every rank must call it."""
    digest = hashlib.blake2b(b"".join(map(bytes_of, tf.nest.flatten(first))), digest_size=16)
    digests = all_gather_object(collective, digest.hexdigest(), name="first samples")
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if feed.is_shared and different:
        raise DataError(
            f"the dataset gives rank {different[0]} other samples than rank 0: the first {order.global_batch_size}, of "
            f"which each rank takes its slice, are not the same. {SAME_REMEDY}",
            reach="run",
        )
    if not (feed.is_shared or different) and len(digests) > 1:
        LOG.warning(
            f"all {len(digests)} ranks are fed the very same first batch, so that each sample counts "
            f"{len(digests)} times. Give each rank its own, by the rank and the size that your code is given."
        )


# --- Structure, types and shapes of batches ---


class Form:
    """Spec of batches (x, y), without the number of samples."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.specs: list[tf.TensorSpec] = tf.nest.flatten(spec)
        self.nothing = []
        for spec in self.specs:
            shape = [0, *(length or 0 for length in spec.shape[1:])]
            self.nothing.append(np.zeros(shape, spec.dtype.as_numpy_dtype))

    def _has_kinds(self, leaves: Sequence[np.ndarray]) -> bool:
        """Return True if arrays have these types and known dimensions."""
        for leaf, spec in zip(leaves, self.specs, strict=True):
            if tf.as_dtype(leaf.dtype) != spec.dtype or leaf.ndim != spec.shape.rank:
                return False
            for length, known in zip(leaf.shape[1:], spec.shape[1:], strict=True):
                if known is not None and length != known:
                    return False
        return True

    def look(self, x: Any, y: Any, *, rank: int, step: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Check a batch; return its indices int64 [n] and its flat arrays."""
        leaves = tf.nest.flatten((x, y))
        lengths = {len(leaf) if leaf.ndim else -1 for leaf in leaves}
        has_structure = has_structure_of(self.spec, (x, y), with_keys=True)
        if not has_structure or not self._has_kinds(leaves) or len(lengths) != 1 or -1 in lengths:
            raise DataError(
                f"rank {rank} was fed {describe_structure((x, y))} in step {step + 1}; each batch must have the first "
                f"one's structure, types and shapes, {describe_structure(self.spec)}, and one number of samples in "
                f"all its arrays. {PADDING_REMEDY} Resize images to one size."
            )
        # Native byte order, and str as objects: TensorFlow takes an array's bytes unchanged.
        arrays = [np.asarray(leaf, spec.dtype.as_numpy_dtype) for leaf, spec in zip(leaves, self.specs, strict=True)]
        return np.arange(lengths.pop()), arrays


def as_arrays(value: Any, *, with_names: bool = False) -> Any:
    """Convert leaves to arrays; a list is one, tuples and dicts are structures.

    Copies arrays, whose memory may be reused, except TensorFlow's. Namedtuples are kept only ``with_names``.
    """
    if isinstance(value, Mapping):
        return {key: as_arrays(item, with_names=with_names) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [as_arrays(item, with_names=with_names) for item in value]
        return type(value)(*items) if with_names and hasattr(value, "_fields") else tuple(items)
    return np.asarray(value) if tf.is_tensor(value) else np.array(value)


def agree_on_form(collective: Collective, first: tuple[Any, Any] | None, spec: Any = None) -> Form:
    """Use the first rank's with a batch; raise on every rank if they differ. Collective.

    ``spec``: TensorSpecs of all batches, whose unknown dimensions are not compared; None: as ``first``.
    """
    mine = None if first is None else _kinds_of(tuple(first), spec)
    all_ranks = all_gather_object(collective, mine, name="feed_spec")
    fed = [(rank, spec) for rank, spec in enumerate(all_ranks) if spec is not None]
    if not fed:
        raise DataError("no rank was fed a single batch. Look at the generator, or the function.", reach="run")
    _, expected = fed[0]
    for rank, kinds in fed:
        if kinds == expected:
            continue
        first_spec = _from_json(expected)
        other_spec = _from_json(kinds)
        remedy = "Let all ranks run the same code on data of the same kind."
        if _differ_in_lengths_only(first_spec, other_spec):
            remedy = f"{PADDING_REMEDY} Resize images to one size."
        raise DataError(
            f"rank {fed[0][0]} is fed {describe_structure(first_spec)}, but rank {rank} "
            f"{describe_structure(other_spec)}; structure, types and shapes must be the same on every rank. {remedy}",
            reach="run",
        )
    return Form(_from_json(expected))


def _differ_in_lengths_only(one: Any, other: Any) -> bool:
    """Return True if two structures of TensorSpecs are equal in types and numbers of dimensions."""
    if not has_structure_of(one, other, with_keys=True):
        return False
    for mine, theirs in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
        if mine.dtype != theirs.dtype or mine.shape.rank != theirs.shape.rank:
            return False
    return True


def _kinds_of(first: tuple[Any, Any], spec: Any) -> Any:
    """Return a structure of types and shapes, such as ``float32 [3]`` for [n, 3], with null for unknown dimensions."""
    leaves = tf.nest.flatten(first)
    specs = tf.nest.flatten(spec)
    if len(specs) != len(leaves):
        specs = [None] * len(leaves)
    kinds = []
    for leaf, leaf_spec in zip(leaves, specs, strict=True):
        array = np.asarray(leaf)
        shape: list[int | None] = list(array.shape[1:])
        if leaf_spec is not None and leaf_spec.shape.rank == array.ndim:
            shape = list(leaf_spec.shape[1:])
        kinds.append(f"{tf.as_dtype(array.dtype).name} {json.dumps(shape)}")
    return tf.nest.pack_sequence_as(first, kinds)


@contextlib.contextmanager
def explaining_lengths(who: str, step: int) -> Iterator[None]:
    """Explain TensorFlow's error about samples of different lengths, which make no batch."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if not any(sign in str(error) for sign in SIGNS_OF_LENGTHS):
            raise
        raise DataError(
            f"{who} cannot make a batch for step {step + 1}, as its samples have different shapes. {PADDING_REMEDY}"
        ) from error


def _from_json(value: Any) -> Any:
    """Specs [n, ...] of a structure of kinds."""
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(map(_from_json, value))
    dtype, _, shape = value.partition(" ")
    return tf.TensorSpec([None, *json.loads(shape)], tf.as_dtype(dtype))
