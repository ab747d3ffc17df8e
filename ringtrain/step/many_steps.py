"""Several training steps in one call: a loop in the graph, which also reads the batches.

Each pass of the loop is the same traced step, so that the results are bit-identical to those of single calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import tensorflow as tf

from ringtrain.data.batches import Batches
from ringtrain.data.pipeline import Batch
from ringtrain.runtime.activity import Phase
from ringtrain.step.report import EXTRA_SCALARS, unpack
from ringtrain.step.train_step import TrainStep, trace

LEARNING_RATES = tf.TensorSpec([None], tf.float64)


class ManySteps:
    """Train at most ``len(learning_rates)`` steps in one call.

    It ends after a step that is not finite, or in which a rank has voted to stop.
    """

    def __init__(self, step: TrainStep, batches: Batches, *, has_clock: bool) -> None:
        """``has_clock``: TensorFlow refuses clocks in deterministic mode."""
        self._step, self._batches, self._has_clock = step, batches, has_clock
        with tf.device("CPU:0"):
            self._position = tf.Variable(0, dtype=tf.int64, trainable=False, name="position")
        self._train: Any = None
        self._first_step = 0

    @property
    def is_traced(self) -> bool:
        return self._train is not None

    def trace(self) -> None:
        signature = [tf.TensorSpec([], tf.int64), LEARNING_RATES, EXTRA_SCALARS, *self._batches.call_signature]
        self._train, _ = trace(lambda *given: (self._train_steps(*given), None), signature)

    def begin(self, first_step: int) -> None:
        """Set the step of ``find_phase``, from 0."""
        self._first_step = first_step

    def __call__(
        self, first_step: int, learning_rates: Sequence[float], *, is_stop_wanted: bool
    ) -> tuple[npt.NDArray[Any], float, Batch]:
        """``first_step`` is from 0. Collective.

        Returns:
            Of each trained step, control vector and facts; the wait for batches in seconds (0 without clock); the last
            batch.
        """
        count, rows, input_sec, batch = self._train(
            tf.constant(first_step, tf.int64),
            tf.constant(learning_rates, tf.float64),
            tf.constant((is_stop_wanted, 0), tf.float64),
            *self._batches.arguments(first_step, len(learning_rates)),
        )
        return rows.numpy()[: int(count)], float(input_sec), batch

    def find_phase(self) -> tuple[Phase, int]:
        """The present step, from 1; any thread may ask during a call."""
        with tf.device("CPU:0"):  # a GPU may hang
            position = max(int(self._position.value()), 2 * self._first_step)  # an earlier call's before the first step
        step, has_batch = divmod(position, 2)
        return Phase.STEP if has_batch else Phase.DATA, step + 1

    def _train_steps(
        self, first_step: tf.Tensor, learning_rates: tf.Tensor, extra_scalars: tf.Tensor, *of_batches: Any
    ) -> tuple[tf.Tensor, ...]:
        step, spec, limit = self._step, self._step.usual_spec, tf.shape(learning_rates)[0]
        returned, can_read_again = step.train.structured_outputs, self._batches.can_read_again

        def read(number: tf.Tensor) -> Batch:
            return tf.nest.map_structure(with_shape, self._batches.read(of_batches, number), spec)

        def train(
            number: tf.Tensor, continues: tf.Tensor, rows: tf.TensorArray, input_sec: tf.Tensor, *_: Any
        ) -> tuple[Any, ...]:
            position = 2 * (first_step + tf.cast(number, tf.int64))
            begin = [self._position.assign(position, read_value=False), *self._read_clock()]
            with tf.control_dependencies(begin):
                batch = read(number)
            with tf.control_dependencies(tf.nest.flatten(batch)):
                end = [self._position.assign(position + 1, read_value=False), *self._read_clock()]
            with tf.control_dependencies(end):
                row = step.train(batch, tf.gather(learning_rates, number), extra_scalars)
            if self._has_clock:
                input_sec += end[1] - begin[1]
            report = unpack(row, step.metric_names)
            continues = (report.is_finite > 0) & (report.stop_votes == 0)
            return number + 1, continues, rows.write(number, row), input_sec, *([] if can_read_again else [batch])

        rows = tf.TensorArray(returned.dtype, size=limit, element_shape=returned.shape)
        carried = [] if can_read_again else [spec]  # each tensor that the loop carries costs time
        zeros = tf.nest.map_structure(lambda part: tf.zeros([n or 0 for n in part.shape], part.dtype), carried)
        initial = (tf.constant(0), tf.constant(True), rows, tf.constant(0.0, tf.float64), *zeros)
        shapes = tf.nest.map_structure(lambda part: part.shape, carried)
        count, _, rows, input_sec, *batch = tf.while_loop(
            lambda number, continues, *_: continues & (number < limit),
            train,
            initial,
            shape_invariants=(
                tf.TensorShape([]),
                tf.TensorShape([]),
                tf.TensorShape(None),
                tf.TensorShape([]),
                *shapes,
            ),
            parallel_iterations=1,  # the next step needs the weights of this one
        )
        return count, rows.stack(), input_sec, read(count - 1) if can_read_again else batch[0]

    def _read_clock(self) -> list[tf.Tensor]:
        return [tf.timestamp()] if self._has_clock else []


def with_shape(tensor: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    tensor.set_shape(spec.shape)
    return tensor
