"""Batches of arrays in memory: gathered in the graph, without a tf.data pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.data.batches import Batches
from ringtrain.data.order import LocalBatch, SampleOrder
from ringtrain.data.pipeline import Batch
from ringtrain.data.sources import ArraySource
from ringtrain.runtime.world import World

INDICES, NUMBER = tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)


class ArrayBatches(Batches):
    """Batches of an ``ArraySource``."""

    call_signature = (tf.TensorSpec([None, None], tf.int64), NUMBER, NUMBER)
    can_read_again = True

    def __init__(
        self, source: ArraySource, order: SampleOrder, world: World, *, first_step: int, end_step: int
    ) -> None:
        self._source, self._order, self._world = source, order, world
        self._planned: Iterator[LocalBatch] = iter(())  # many steps at a time
        self._read = tf.function(self._gather, input_signature=[INDICES, NUMBER, NUMBER], autograph=False)
        outputs = self._read.get_concrete_function().structured_outputs
        spec = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape, part.dtype), outputs)
        super().__init__(spec, first_step=first_step, end_step=end_step)

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
