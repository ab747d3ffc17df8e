"""Batches of a run, with the global number of samples of each step.

For streams it is known only when every rank has its batch: ranks then send their counts for the next step in the
control vector.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective
from ringtrain.data.order import LocalBatch, SampleOrder, StreamingOrder
from ringtrain.data.pipeline import Batch
from ringtrain.data.sources import SAME_REMEDY, ArraySource
from ringtrain.errors import DataError
from ringtrain.runtime.world import World

Explain = Callable[[Exception, int], Exception]
INDICES, NUMBER = tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)


class Batches(abc.ABC):
    """Batches with counts known in advance."""

    max_steps_ahead = 1  # of the host's work; 0: ``note`` must be called before the next batch
    can_begin_again = True  # from the first step
    can_read_again = False  # ``read`` returns the same batch if it is called once more
    why_single_steps = ""  # reason why a call cannot train many steps
    next_local_count = 0  # this rank's samples of the next step
    call_signature: tuple[Any, ...]  # of ``arguments``, for a call that trains many steps

    def __init__(
        self,
        element_spec: Any,
        order: SampleOrder,
        *,
        first_step: int,
        end_step: int,
        explain: Explain = lambda error, step: error,
    ) -> None:
        """``explain`` converts an error of ``read`` or of the pipeline; the step is from 0."""
        self.element_spec, self.explain, self._order = element_spec, explain, order
        self._first_step, self._end_step, self._next_step = first_step, end_step, first_step

    def begin(self) -> None:  # noqa: B027
        """Read ahead for the first step. Collective."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """One batch per step. Collective."""

    @abc.abstractmethod
    def arguments(self, step: int, num_steps: int) -> tuple[Any, ...]:
        """Return arguments of ``read`` for the steps from ``step`` on, from 0; their batches have the usual size."""

    @abc.abstractmethod
    def read(self, arguments: tuple[Any, ...], number: tf.Tensor) -> Batch:
        """Read the batch of one of these steps, by its number from 0, in a graph."""

    def skip(self, num_steps: int) -> None:
        """Continue after steps that ``read`` has read."""
        self._next_step += num_steps

    def note(self, read_next_count: Callable[[], float]) -> None:  # noqa: B027
        """Get the sum of all ranks' ``next_local_count``."""

    def samples_before(self, step: int) -> int:
        """Samples of all ranks; ``step`` is the next one."""
        return self._order.samples_before(step)

    def state_before(self, step: int) -> tuple[int, bytes] | None:
        """Return the pipeline's last state up to a step; None if unsupported."""
        return None

    def is_last(self, step: int) -> bool:
        """``step`` is from 1, the latest; the same on every rank."""
        return step == self._end_step


class PipelineBatches(Batches):
    """Batches of a tf.data pipeline."""

    def __init__(self, dataset: tf.data.Dataset, order: SampleOrder, **steps: Any) -> None:
        super().__init__(dataset.element_spec, order, **steps)
        self.call_signature = (tf.data.IteratorSpec(dataset.element_spec),)
        self._dataset = dataset
        self._remaining: Iterator[Batch] = iter(())

    def __iter__(self) -> Iterator[Batch]:
        self._remaining, self._next_step = iter(self._dataset), self._first_step
        try:
            while self._next_step < self._end_step:
                step, self._next_step = self._next_step, self._next_step + 1
                yield self._next_of(step)
        finally:
            self._remaining = iter(())  # its threads end

    def arguments(self, step: int, num_steps: int) -> tuple[Any, ...]:
        return (self._remaining,)

    def read(self, arguments: tuple[Any, ...], number: tf.Tensor) -> Batch:
        return next(arguments[0])

    def _next_of(self, step: int) -> Batch:
        try:
            return next(self._remaining)
        except tf.errors.OpError as error:
            raise self.explain(error, step) from error


class StreamBatches(PipelineBatches):
    """Batches of a stream, whose counts are known one step ahead.

    While a step is computed, each rank reads its next batch; the number of its samples travels with the
    sums of the step. A rank whose pass has ended joins with empty batches until no rank has a sample.
    """

    max_steps_ahead = 0
    can_begin_again = False
    why_single_steps = "the samples of a step are known only after the step before it"
    _order: StreamingOrder

    def __init__(
        self,
        dataset: tf.data.Dataset,
        order: StreamingOrder,
        collective: Collective,
        *,
        samples_seen: int,
        state_before: Callable[[int], tuple[int, bytes]] | None = None,
        **steps: Any,
    ) -> None:
        """Create batches; ``begin`` reads the first one.

        Args:
            dataset: of ``Batch``, this rank's.
            order: the plan of the stream.
            collective: of all ranks.
            samples_seen: by all ranks before the first step; 0: as planned.
            state_before: the pipeline's state by step, if it can be saved.
            steps: see ``Batches``.
        """
        super().__init__(dataset, order, **steps)
        self._collective = collective
        self._state_before = state_before
        self._upcoming: Batch | None = None
        self._global_count = 0
        self._samples_seen = samples_seen or order.samples_before(self._first_step)

    def begin(self) -> None:
        """Read the first batch, and tell all ranks its number of samples. Collective."""
        self._remaining = iter(self._dataset)
        if self._first_step < self._end_step:
            self._look_ahead(self._first_step)
            own_count = tf.constant([self.next_local_count], tf.int64)
            self.note(lambda: tf.reduce_sum(self._collective.all_gather(own_count, name="first_count")))

    def __iter__(self) -> Iterator[Batch]:
        while self._global_count:
            step = self._next_step
            batch = self._upcoming_of(step)
            if batch is None:
                batch = self._empty_batch(step)
            else:
                self._upcoming = None
            batch = batch._replace(global_count=tf.constant(self._global_count, tf.int64))
            self._next_step = step + 1
            self._samples_seen += self._global_count
            self._look_ahead(step + 1)
            yield batch

    def note(self, read_next_count: Callable[[], float]) -> None:
        """Raise on every rank if the next step has no sample that it should have."""
        self._global_count = int(read_next_count())
        if self._next_step < self._end_step:
            self._check(self._next_step)

    def samples_before(self, step: int) -> int:
        return self._samples_seen

    def state_before(self, step: int) -> tuple[int, bytes] | None:
        return self._state_before(step) if self._state_before else None

    def is_last(self, step: int) -> bool:
        return super().is_last(step) or not self._global_count

    def _look_ahead(self, step: int) -> None:
        if self._upcoming is None and step < self._end_step:
            with contextlib.suppress(StopIteration):
                self._upcoming = self._next_of(step)
        upcoming = self._upcoming_of(step)
        self.next_local_count = 0 if upcoming is None else int(upcoming.indices.shape[0])

    def _upcoming_of(self, step: int) -> Batch | None:
        """Return this rank's batch of ``step``, if it was read and there is one."""
        upcoming = self._upcoming
        return upcoming if upcoming is not None and int(upcoming.step) == step else None

    def _empty_batch(self, step: int) -> Batch:
        empty = tf.nest.map_structure(
            lambda part: tf.zeros([size or 0 for size in part.shape], part.dtype), self.element_spec
        )
        return empty._replace(step=tf.constant(step, tf.int64))

    def _check(self, step: int) -> None:
        """Compare the number of samples in ``step``, from 0, with the plan."""
        count = self._global_count
        upcoming = self._upcoming_of(step)
        planned_count = 0 if upcoming is None else int(upcoming.global_count)
        if self._order.is_shared and planned_count and planned_count != count:
            raise DataError(
                f"the dataset gives this rank {planned_count} samples for step {step + 1}, but the ranks' slices of "
                f"what they were given are {count}: it is not the same on all ranks. {SAME_REMEDY}",
                reach="rank",
            )
        if not count and not self._order.is_single_pass:
            steps_per_epoch = self._order.steps_per_epoch
            raise DataError(
                f"no rank was fed anything for step {step % steps_per_epoch + 1} of an epoch, but steps_per_epoch "
                f"is {steps_per_epoch}; every epoch must have as many. Lower it, or feed more.",
                reach="run",
            )


class ArrayBatches(Batches):
    """Batches of an ``ArraySource``: gathered in the graph, without a tf.data pipeline."""

    call_signature = (tf.TensorSpec([None, None], tf.int64), NUMBER, NUMBER)
    can_read_again = True

    def __init__(
        self, source: ArraySource, order: SampleOrder, world: World, *, first_step: int, end_step: int
    ) -> None:
        self._source, self._world = source, world
        self._planned: Iterator[LocalBatch] = iter(())  # many steps at a time
        self._read = tf.function(self._gather, input_signature=[INDICES, NUMBER, NUMBER], autograph=False)
        outputs = self._read.get_concrete_function().structured_outputs
        spec = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape, part.dtype), outputs)
        super().__init__(spec, order, first_step=first_step, end_step=end_step)

    def __iter__(self) -> Iterator[Batch]:
        self._next_step = self._first_step
        while self._next_step < self._end_step:
            local = self._plan(self._next_step)
            self._next_step += 1
            yield self._read(*map(to_int64, (local.indices, local.step, local.global_count)))

    def arguments(self, step: int, num_steps: int) -> tuple[tf.Tensor, ...]:
        planned = [self._plan(step + number) for number in range(num_steps)]
        indices = np.stack([local.indices for local in planned])
        return tuple(map(to_int64, (indices, step, planned[0].global_count)))

    def read(self, arguments: tuple[tf.Tensor, ...], number: tf.Tensor) -> Batch:
        indices, step, global_count = arguments
        # tf.gather: one operation, where indices[number] is five.
        return self._gather(tf.gather(indices, number), step + tf.cast(number, tf.int64), global_count)

    def _gather(self, indices: tf.Tensor, step: tf.Tensor, global_count: tf.Tensor) -> Batch:
        return Batch(*self._source.gather(indices), indices, step, global_count)

    def _plan(self, step: int) -> LocalBatch:
        local = next(self._planned, None)
        if local is None or local.step != step:
            world = self._world
            self._planned = self._order.local_batches(step, self._end_step, rank=world.rank, size=world.size)
            local = next(self._planned)
        return local


def to_int64(value: Any) -> tf.Tensor:
    return tf.constant(value, tf.int64)
