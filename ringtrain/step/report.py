"""The results of a training step: its numbers and their meaning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

# The control vector begins with these sums over all samples of all ranks; the metrics' sums follow in the order of
# their names. Regularisation is weighted by samples, so that its mean is its value; the last two are the ranks' votes
# to end the training after the step, and what they have for the next one.
CONTROL_SUMS = ("samples", "data_loss", "regularization", "stop_votes", "next_samples")
NUM_EXTRA_SCALARS = 2  # the last of them are what each rank tells the others, besides what it computes
# What a step returns behind the control vector: already identical on every rank except the last two. Communication
# is how long this rank waited for the sums after its own last gradient; 0 if that is not timed.
STEP_FACTS = (
    "is_finite", "gradient_norm", "learning_rate", "loss_scale", "divergent_state", "local_data_loss",
    "communication_sec",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The results of a step, over all samples of all ranks."""

    samples: int  # of the global batch
    loss: float  # the objective: data_loss plus regularisation
    data_loss: float  # mean of the samples' losses
    metrics: dict[str, float]  # means of the workload's
    is_finite: bool  # False if nothing was updated, because the loss or a gradient was not finite on some rank
    gradient_norm: float  # Euclidean, of the reduced gradient
    learning_rate: float
    loss_scale: float  # under mixed_float16, 1 otherwise
    local_data_loss: float  # sum of the losses of this rank's samples


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


def read_value(returned: tf.Tensor, name: str) -> float:
    """One of the ``CONTROL_SUMS`` or ``STEP_FACTS`` that a step returned."""
    at = CONTROL_SUMS.index(name) if name in CONTROL_SUMS else STEP_FACTS.index(name) - len(STEP_FACTS)
    return float(returned.numpy()[at])


def read_loss(returned: tf.Tensor) -> float:
    """The objective that a step returned, not rounded to few digits: ``StepReport.loss`` without the others."""
    samples, data_loss, regularization, *_ = returned.numpy()
    return float((data_loss + regularization) / samples)


def _shortest(value: Any) -> float:
    """A NumPy number as the float with the fewest digits that is the same in its own type: 0.1, not 0.10000000149."""
    return float(str(value)) if math.isfinite(value) else float(value)
