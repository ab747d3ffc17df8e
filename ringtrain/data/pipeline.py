"""source + order + rank -> this rank's batches, as a tf.data.Dataset."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ringtrain.data.augment import graph_code, sample_keys
from ringtrain.data.order import SampleOrder
from ringtrain.data.sources import Source
from ringtrain.errors import RingtrainError, UsageError
from ringtrain.runtime.world import World

OTHER_COUNT = "gave another number of samples than it got"
# (x, y, keys) -> (x, y); keys of augment.sample_keys
Augment = Callable[[Any, Any, tf.Tensor], tuple[Any, Any]]

PREFETCHED_BATCHES = 2
PLANNED_STEPS = 32


class Batch(NamedTuple):
    x: Any  # tensors [n, ...] or structures of them; n may be 0
    y: Any
    indices: Any  # of the samples, int64 [n]
    step: Any  # int64 []
    global_count: Any  # samples of all ranks, int64 []


def local_batches(
    source: Source,
    order: SampleOrder,
    world: World,
    *,
    first_step: int,
    end_step: int,
    num_threads: int,
    augment: Augment | None = None,
) -> tf.data.Dataset:
    """Return a dataset of ``Batch``; ``end_step`` is exclusive."""

    def plan(first: np.int64) -> list[np.ndarray]:
        end = min(int(first) + PLANNED_STEPS, end_step)
        planned = list(order.local_batches(int(first), end, rank=world.rank, size=world.size))
        counts = np.array([len(local.indices) for local in planned])
        # At least one column: TensorFlow's unbatch reads empty rows from address 0 (2.18).
        padded = np.zeros((len(planned), max(counts.max(), 1)), np.int64)
        for row, local in zip(padded, planned, strict=True):
            row[: len(local.indices)] = local.indices
        numbers = [(local.step, local.epoch, local.global_count) for local in planned]
        return [padded, counts, *np.array(numbers, np.int64).T]

    def plan_steps(first: tf.Tensor) -> tf.data.Dataset:
        planned = tf.numpy_function(plan, [first], [tf.int64] * 5)
        for tensor, shape in zip(planned, ([None, None], *[[None]] * 4), strict=True):
            tensor.set_shape(shape)
        return tf.data.Dataset.from_tensor_slices(tuple(planned))

    def read(padded: tf.Tensor, count: tf.Tensor, step: tf.Tensor, epoch: tf.Tensor, global_count: tf.Tensor) -> Batch:
        indices = padded[:count]
        x, y = as_pair(source.gather, graph_code(source.gather)(indices))
        if augment is not None:
            x, y = change(augment, x, y, sample_keys(order.seed, epoch, indices))
        return Batch(x, y, indices, step, global_count)

    # Many steps per call, since entering Python is slow; from_generator and unbatch start half as fast.
    planned = tf.data.Dataset.range(first_step, end_step, PLANNED_STEPS).flat_map(graph_code(plan_steps))
    with own_errors():
        return in_own_threads(planned.map(graph_code(read)), num_threads)


def in_own_threads(
    dataset: tf.data.Dataset, num_threads: int, *, num_ahead: int = PREFETCHED_BATCHES
) -> tf.data.Dataset:
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = num_threads
    return dataset.prefetch(num_ahead).with_options(options)


def as_pair(method: Callable[..., Any], given: Any, *, of: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """Check a user-defined method's (x, y); ``of``: required structure."""
    if isinstance(given, (tuple, list)) and len(given) == 2 and all(map(_holds_samples, tf.nest.flatten(given))):
        pair = (given[0], given[1])
        if of is None or has_structure_of(of, pair):
            return pair
    name = getattr(method, "__qualname__", type(method).__name__)
    got = "" if of is None else f" in the structure in which it got them, {describe_structure(of)}"
    raise UsageError(
        f"{name} gave {describe_structure(given)}; it must give the pair (x, y){got}: arrays [n, ...] of n samples, or "
        f"tuples or dicts of such. {'Return unchanged what it does not change.' if of else 'Return x, y.'}"
    )


def change(augment: Augment, x: Any, y: Any, keys: tf.Tensor) -> tuple[Any, Any]:
    """If it changes the number of samples, the graph raises an error: see ``explain_change``."""
    changed = as_pair(augment, graph_code(augment)(x, y, keys), of=(x, y))
    said = f"{getattr(augment, '__qualname__', type(augment).__name__)} {OTHER_COUNT}"
    given = {id(leaf) for leaf in tf.nest.flatten((x, y))}  # no check of unchanged tensors
    others = [leaf for leaf in tf.nest.flatten(changed) if id(leaf) not in given]
    same = [tf.debugging.assert_equal(tf.shape(leaf)[0], tf.shape(keys)[0], said) for leaf in others]
    with tf.control_dependencies(same):
        return tf.nest.map_structure(tf.identity, changed) if same else changed


def explain_change(error: Exception, step: int) -> Exception:
    """Convert errors of ``change``; ``step`` from 0."""
    found = re.search(rf"[^\s\[]+ {OTHER_COUNT}", str(error))
    return (
        UsageError(
            f"{found[0]} in step {step + 1}; it must give as many. Change samples, and leave none out.", reach="rank"
        )
        if found
        else error
    )


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raise our own errors, which AutoGraph wraps while tracing."""
    try:
        yield
    except Exception as error:
        if isinstance(error.__context__, RingtrainError):
            raise error.__context__ from None
        raise


def with_batch_size(batch_spec: Batch, size: int) -> Batch:
    """Return the specification of batches of exactly ``size`` samples."""

    def with_size(spec: Any) -> Any:
        return tf.TensorSpec([size, *spec.shape[1:]], spec.dtype) if spec.shape.rank else spec

    return tf.nest.map_structure(with_size, batch_spec)


def describe_structure(value: Any) -> str:
    """Return for example ``(float32 [n, 3], int64 [n])``."""
    return str(tf.nest.map_structure(_words, value)).replace("'", "")


def _words(leaf: Any) -> str:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return "None" if leaf is None else type(leaf).__name__
    shape, dtype = tf.TensorShape(leaf.shape), tf.as_dtype(leaf.dtype).name
    if shape.rank is None:
        return f"{dtype} of unknown shape"
    return f"{dtype} [{', '.join(['n', *map(str, shape[1:])])}]" if shape.rank else f"{dtype}, a single value"


def _holds_samples(leaf: Any) -> bool:
    return (tf.is_tensor(leaf) or isinstance(leaf, np.ndarray)) and tf.TensorShape(leaf.shape).rank != 0


def has_structure_of(one: Any, other: Any, *, with_keys: bool = False) -> bool:
    """Compare tuples and dicts; ``with_keys``: also the keys."""
    try:
        tf.nest.assert_same_structure(one, other, check_types=with_keys)
    except (TypeError, ValueError):
        return False
    return True
