"""The numbers of a training step, which it returns in one vector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf


class StepReport(NamedTuple):
    """Numbers in the order of the vector; those before ``is_finite`` are sums over all samples (the control vector)."""

    samples: Any
    data_loss_sum: Any
    regularization_sum: Any  # weighted by samples: its mean is its value
    stop_votes: Any
    next_samples: Any  # of the next step, if not planned
    metric_sums: Mapping[str, Any]
    is_finite: Any  # 0: not updated, as a loss or gradient was not finite on some rank
    gradient_norm: Any  # Euclidean, of the reduced gradient
    learning_rate: Any
    loss_scale: Any  # mixed_float16; otherwise 1
    divergent_state: Any  # see ``from_sums``
    local_data_loss: Any  # sum over this rank's samples
    communication_sec: Any  # this rank's wait after its last gradient; 0 if not timed

    @property
    def loss(self) -> float:
        """``data_loss`` plus regularization."""
        return shortest(self.data_loss_sum / self.samples + self.regularization_sum / self.samples)

    @property
    def data_loss(self) -> float:
        return shortest(self.data_loss_sum / self.samples)

    @property
    def metrics(self) -> dict[str, float]:
        return {name: shortest(total / self.samples) for name, total in self.metric_sums.items()}


NUM_SUMS = StepReport._fields.index("metric_sums")
NUM_EXTRA_SCALARS = 2  # stop_votes and next_samples, which the caller of the step adds
EXTRA_SCALARS = tf.TensorSpec([NUM_EXTRA_SCALARS], tf.float64)
FACTS = StepReport._fields[NUM_SUMS + 1 :]


def pack_sums(count: tf.Tensor, data_loss: tf.Tensor, regularization: tf.Tensor, metrics: Sequence[Any]) -> tf.Tensor:
    no_extra_scalars = [tf.zeros([], count.dtype)] * NUM_EXTRA_SCALARS
    return tf.stack([count, data_loss, regularization * count, *no_extra_scalars, *metrics])


def add_extra_scalars(sums: tf.Tensor, extra_scalars: tf.Tensor) -> tf.Tensor:
    padding = [NUM_SUMS - NUM_EXTRA_SCALARS, sums.shape[0] - NUM_SUMS]
    return sums + tf.pad(tf.cast(extra_scalars, sums.dtype), [padding])


def pack(sums: tf.Tensor, *, local_sums: tf.Tensor, **facts: tf.Tensor) -> tf.Tensor:
    facts["local_data_loss"] = local_sums[StepReport._fields.index("data_loss_sum")]
    return tf.concat([sums, tf.stack([tf.cast(facts[name], sums.dtype) for name in FACTS])], axis=0)


def unpack(vector: Any, metric_names: Sequence[str]) -> StepReport:
    """``vector``: in a graph, or on the host; [numbers] of a step or [numbers, steps]."""
    values = [vector[index] for index in range(vector.shape[0])]
    metric_sums = dict(zip(metric_names, values[NUM_SUMS : -len(FACTS)], strict=True))
    return StepReport._make([*values[:NUM_SUMS], metric_sums, *values[-len(FACTS) :]])


def shortest(value: Any) -> float:
    """Shortest equal decimal: 0.1, not 0.10000000149."""
    return float(str(value)) if math.isfinite(value) else float(value)
