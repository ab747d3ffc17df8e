"""How a training step went: the numbers that it returns, and what they say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

# The control vector begins with these sums over all samples of all ranks; the metrics' sums follow in the order of
# their names. Regularisation is weighted by samples, so that its mean is its value.
CONTROL_SUMS = ("samples", "data_loss", "regularization", "stop_votes", "next_samples")
NUM_EXTRA_SCALARS = 2  # the last of them are what each rank tells the others, besides what it computes
# What a step returns behind the control vector: already identical on every rank but for the last two.
STEP_FACTS = ("is_finite", "gradient_norm", "learning_rate", "loss_scale", "local_data_loss", "communication_sec")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """How a step went, over all samples of all ranks.

    Attributes:
        samples: samples of the global batch.
        loss: the objective: data_loss plus regularisation.
        data_loss: mean of the samples' losses.
        metrics: means of the workload's metrics.
        is_finite: False where nothing was updated, because the loss or a gradient was not finite on some rank.
        gradient_norm: Euclidean norm of the reduced gradient.
        learning_rate: that of this step.
        loss_scale: factor of the loss under mixed_float16, 1 otherwise.
        local_data_loss: sum of the losses of this rank's samples.
    """

    samples: int
    loss: float
    data_loss: float
    metrics: dict[str, float]
    is_finite: bool
    gradient_norm: float
    learning_rate: float
    loss_scale: float
    local_data_loss: float


def read_report(returned: tf.Tensor, metric_names: Sequence[str]) -> StepReport:
    """Bring to the host what a step returned: the control vector, then the step's facts."""
    values = returned.numpy()
    num_sums = len(values) - len(STEP_FACTS)
    sums, facts = values[:num_sums], dict(zip(STEP_FACTS, values[num_sums:], strict=True))
    samples = int(sums[0])
    data_loss, regularization, _, _, *metrics = (_shortest(value / sums[0]) for value in sums[1:])
    return StepReport(
        samples=samples,
        loss=_shortest(values.dtype.type(data_loss) + values.dtype.type(regularization)),
        data_loss=data_loss,
        metrics=dict(zip(metric_names, metrics, strict=True)),
        is_finite=bool(facts["is_finite"]),
        gradient_norm=_shortest(facts["gradient_norm"]),
        learning_rate=_shortest(facts["learning_rate"]),
        loss_scale=float(facts["loss_scale"]),
        local_data_loss=float(facts["local_data_loss"]),
    )


def is_updated(returned: tf.Tensor) -> bool:
    """Whether the step that returned this changed anything; False where it was not finite on some rank."""
    return bool(returned.numpy()[-len(STEP_FACTS)])


def wants_stop(returned: tf.Tensor) -> bool:
    """Whether some rank voted to end the training after the step that returned this."""
    return bool(returned.numpy()[CONTROL_SUMS.index("stop_votes")])


def communication_seconds(returned: tf.Tensor) -> float:
    """How long this rank waited for the sums after its own last gradient; 0 where that is not timed."""
    return float(returned.numpy()[-1])


def next_samples(returned: tf.Tensor) -> int:
    """The sum of all ranks' ``next_count``."""
    return int(returned.numpy()[CONTROL_SUMS.index("next_samples")])


def _shortest(value: Any) -> float:
    """A NumPy number as the float with the fewest digits that is the same in its own type: 0.1, not 0.10000000149."""
    return float(str(value)) if math.isfinite(value) else float(value)
