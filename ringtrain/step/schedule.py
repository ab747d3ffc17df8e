"""The learning rate as a pure function of the samples seen, not of the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringtrain.config import OptimizerConfig

POLYNOMIAL_POWER = 2  # as MLPerf with LARS


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    optimizer: OptimizerConfig
    batch_ratio: float  # global batch size, relative to the one of ``optimizer.lr``
    samples_per_epoch: int
    total_samples: int  # of the run; the end of decaying schedules

    @property
    def peak(self) -> float:
        """Scaled rate: linear (Goyal et al. 2017, section 2.1) or sqrt (Krizhevsky 2014)."""
        exponent = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.optimizer.lr_scale]
        return self.optimizer.lr * self.batch_ratio**exponent

    def __call__(self, samples_seen: int) -> float:
        warmup_samples = self.optimizer.warmup_epochs * self.samples_per_epoch
        if samples_seen < warmup_samples:
            # Goyal et al. 2017, section 2.2: from the unscaled rate to the scaled one
            start = self.optimizer.lr if self.optimizer.lr_scale != "none" else 0.0
            return start + (self.peak - start) * samples_seen / warmup_samples
        return self.peak * self._decay(samples_seen, warmup_samples)

    def _decay(self, samples_seen: int, warmup_samples: float) -> float:
        if self.optimizer.schedule == "exponential":
            stairs = math.floor(samples_seen / (self.optimizer.decay_epochs * self.samples_per_epoch))
            return self.optimizer.decay_rate**stairs
        fraction = min((samples_seen - warmup_samples) / max(self.total_samples - warmup_samples, 1), 1.0)
        if self.optimizer.schedule == "cosine":
            # Loshchilov and Hutter 2017, equation 5, without restarts
            return 0.5 * (1 + math.cos(math.pi * fraction))
        if self.optimizer.schedule == "linear":
            return 1.0 - fraction
        if self.optimizer.schedule == "polynomial":
            return (1.0 - fraction) ** POLYNOMIAL_POWER
        return 1.0
