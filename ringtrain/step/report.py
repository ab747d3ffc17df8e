"""The numbers that a training step returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

# Sums over all samples, followed by the metrics'. Regularization is weighted by samples: its mean is its value.
CONTROL_SUMS = ("samples", "data_loss", "regularization", "stop_votes", "next_samples")
NUM_EXTRA_SCALARS = 2  # the last two of CONTROL_SUMS: votes to stop, samples of the next step
# Follow the control vector; equal on all ranks except the last two. communication_sec: wait after this rank's last
# gradient; 0 if not timed.
STEP_FACTS = (
    "is_finite", "gradient_norm", "learning_rate", "loss_scale", "divergent_state", "local_data_loss",
    "communication_sec",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepReport:
    samples: int
    loss: float  # data_loss plus regularization
    data_loss: float
    metrics: dict[str, float]
    is_finite: bool  # False: not updated, as a loss or gradient was not finite on some rank
    gradient_norm: float  # Euclidean, of the reduced gradient
    learning_rate: float
    loss_scale: float  # mixed_float16; otherwise 1
    local_data_loss: float  # sum over this rank's samples


Returned: TypeAlias = "tf.Tensor | npt.NDArray[Any]"  # control vector and facts of a step


def read_report(returned: Returned, metric_names: Sequence[str]) -> StepReport:
    values = np.asarray(returned)
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


def index_of(name: str) -> int:
    """Index of a number in what a step returns."""
    return CONTROL_SUMS.index(name) if name in CONTROL_SUMS else STEP_FACTS.index(name) - len(STEP_FACTS)


def read_value(returned: Returned, name: str) -> float:
    return float(np.asarray(returned)[index_of(name)])


def read_loss(returned: Returned) -> float:
    samples, data_loss, regularization, *_ = np.asarray(returned)
    return float((data_loss + regularization) / samples)


def _shortest(value: Any) -> float:
    """Shortest equal decimal: 0.1, not 0.10000000149."""
    return float(str(value)) if math.isfinite(value) else float(value)
