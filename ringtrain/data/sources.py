"""Sources: indexed samples. A source says how many samples it has and gathers those that a rank asks for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import numpy as np

from ringtrain.errors import DataError
from ringtrain.messages.defects import describe_defect
from ringtrain.messages.rules import shorten
from ringtrain.runtime import activity

if TYPE_CHECKING:
    import tensorflow as tf


class Source(Protocol):
    """Samples by their number."""

    @property
    def num_samples(self) -> int:
        """Number of samples."""

    def gather(self, indices: tf.Tensor) -> tuple[Any, Any]:
        """The samples ``indices`` (int64 [n]) as (x, y), tensors [n, ...] or structures of them; runs in a graph."""


class BadSample(NamedTuple):
    """A sample that cannot be read.

    Attributes:
        number: which of the source's samples it is.
        description: where it is, such as the path of a file.
        reason: what is wrong with it.
    """

    number: int
    description: str
    reason: str


class FallibleSource(Source, Protocol):
    """Samples that are read when they are needed, and may turn out to be damaged then."""

    @property
    def fingerprint(self) -> str:
        """A short digest of the samples: equal for two ranks, or two runs, with the same samples."""

    def gather_good(self, indices: tf.Tensor) -> tuple[tf.Tensor, Any, Any]:
        """Gather as ``gather`` does, without unreadable samples: (indices of the readable ones, x, y)."""

    def find_bad(self, indices: Any) -> list[BadSample]:
        """The unreadable samples of ``indices`` (integers [n]); outside of graphs."""


def is_fallible(source: Source) -> TypeGuard[FallibleSource]:
    """True if it is a ``FallibleSource``."""
    return hasattr(source, "find_bad")


@dataclass(frozen=True, eq=False)
class ArraySource:
    """Samples held in memory. Build one with ``from_arrays``."""

    x: Any
    y: Any

    num_samples: int

    def gather(self, indices: tf.Tensor) -> tuple[Any, Any]:
        import tensorflow as tf

        with tf.device("CPU"):
            return tf.nest.map_structure(lambda array: tf.gather(array, indices), (self.x, self.y))

    def arrays(self) -> dict[str, tf.Tensor]:
        """The arrays [n, ...] by their places: ``x``, or ``x/image`` if there are several."""
        return {place: array for name in ("x", "y") for place, array in _leaves(name, getattr(self, name))}


def _leaves(place: str, structure: Any) -> Iterator[tuple[str, Any]]:
    """The arrays in tuples and dicts, with their places."""
    if not isinstance(structure, (Mapping, tuple, list)):
        yield place, structure
        return
    for key, part in structure.items() if isinstance(structure, Mapping) else enumerate(structure):
        yield from _leaves(f"{place}/{key}", part)


def from_arrays(x: Any, y: Any) -> ArraySource:
    """A source of samples in memory.

    Args:
        x: the model's inputs: an array [n, ...], or a tuple or dict of such arrays.
        y: what the loss compares the outputs with, in the same form.

    Raises:
        DataError: no array at all, or arrays of different length, or one that is ragged or sparse.
    """
    import tensorflow as tf

    arrays = tf.nest.flatten((x, y))
    for array in arrays:
        if isinstance(array, (tf.RaggedTensor, tf.SparseTensor)):
            raise DataError(
                f"the arrays of a source hold a {type(array).__name__}; they must be dense. Fill it up: "
                f"{'array.to_tensor()' if isinstance(array, tf.RaggedTensor) else 'tf.sparse.to_dense(array)'}."
            )
    lengths = {len(array) for array in arrays if np.ndim(array)}
    if len(lengths) != 1 or not all(map(np.ndim, arrays)):
        shapes = shorten(", ".join(str(np.shape(array)) for array in arrays))
        raise DataError(
            f"the arrays of a source have the shapes {shapes}; the first dimension counts the samples and must be the "
            "same in all of them. Of a list make one array: np.asarray(the_list).",
        )
    try:
        with tf.device("CPU"):
            x, y = tf.nest.map_structure(tf.convert_to_tensor, (x, y))
    except (TypeError, ValueError) as error:  # arrays of objects, of dates
        types = ", ".join(str(getattr(array, "dtype", type(array).__name__)) for array in arrays)
        raise DataError(
            f"the arrays of a source have the types {shorten(types)}, and TensorFlow cannot take them: "
            f"{describe_defect(error)} Give numbers, true or false, or texts, such as by array.astype('float32')."
        ) from error
    return ArraySource(x, y, num_samples=lengths.pop())


# If all ranks must read the same, and do not.
SAME_REMEDY = (
    "Let all ranks list the same files, in one order, and draw nothing in parallel; or give from_dataset a function, "
    "which reads what is the rank's own."
)


class Pass(NamedTuple):
    """A pass over the samples, as one rank makes it.

    Attributes:
        rank: of this process.
        size: the number of ranks.
        seed: of the run.
        epoch: number of the pass, from 0.
        local_batch_size: samples of a usual step on this rank.
        global_batch_size: the same on all ranks together.
    """

    rank: int
    size: int
    seed: int
    epoch: int
    local_batch_size: int
    global_batch_size: int


class Feed(NamedTuple):
    """Batches that user code feeds to each rank, from one of the functions ``from_...``.

    Attributes:
        open_pass: (pass, batches to leave out) -> this rank's batches (x, y); with a third argument, what
            ``read_state`` gave there, nothing has to be read again.
        steps_per_epoch: steps of a pass; None: there is one pass, as long as some rank still has a batch.
        count_steps: the batches of a pass on this rank; None if that is not known.
        replays: whether skipped batches have to be read again.
        is_shared: the batches are those of all ranks together, each of which takes its slice of them.
        read_state: where what was opened last stands now; empty if it cannot say.
        goes_on: a pass begins where the one before has ended, in the same iterator.
    """

    open_pass: Callable[..., Iterator[tuple[Any, Any]]]
    steps_per_epoch: int | None
    count_steps: Callable[[Pass], int | None] = lambda _: None
    replays: bool = True
    is_shared: bool = False
    read_state: Callable[[], bytes] | None = None
    goes_on: bool = False


def from_generator(
    generate: Callable[[int, int], Iterator[tuple[Any, Any]]], *, steps_per_epoch: int | None = None
) -> Feed:
    """Feed each rank with its own generator.

    Ranks may end at different steps, and their batches may be of different sizes, also from step to step:
    each step is the exact mean over the samples of all ranks. A rank without further batches takes part with none until
    all ranks have ended.

    A resumed run replays the pass up to where it was, so a pass must always give the same: let its random numbers
    begin again with it. On another number of ranks the run is refused, since each rank's order is its own.

    Args:
        generate: (rank, size) -> an iterator of batches (x, y): arrays [n, ...], or tuples or dicts of arrays; types,
            and shapes except n, are always the same, on every rank.
        steps_per_epoch: begin the generator again after so many steps. By default there is one pass, and the training
            ends before the first step for which no rank has a sample, or after ``--steps``.
    """

    def open_pass(of: Pass, skip: int) -> Iterator[tuple[Any, Any]]:
        return replay(iter(generate(of.rank, of.size)), skip)

    return Feed(open_pass, steps_per_epoch)


def replay(batches: Iterator[Any], skip: int) -> Iterator[Any]:
    """Yield the batches after those that were trained already, which are read again; that may take long."""
    for _ in itertools.islice(batches, skip):
        activity.move()
    return batches


def from_callable(fetch: Callable[[int, int], tuple[Any, Any] | None], *, steps_per_epoch: int | None = None) -> Feed:
    """Feed each rank by a function of the rank and the step, from 0. For the rest see ``from_generator``.

    Args:
        fetch: (rank, step) -> this rank's batch (x, y) of the step, or None if it has no more. Steps count on from
            epoch to epoch.
        steps_per_epoch: steps of an epoch, for what happens at the end of one. By default the run is one epoch.
    """

    def open_pass(of: Pass, skip: int) -> Iterator[tuple[Any, Any]]:
        for step in itertools.count(of.epoch * (steps_per_epoch or 0) + skip):
            batch = fetch(of.rank, step)
            if batch is None:
                return
            yield batch

    return Feed(open_pass, steps_per_epoch, replays=False)
