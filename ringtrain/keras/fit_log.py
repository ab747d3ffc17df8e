"""Log of a ``fit`` with a run directory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from ringtrain.collectives import all_gather_object, run_on_rank0
from ringtrain.keras.rank_state import Arrays, metric_variables
from ringtrain.training.session import RunSession


@dataclasses.dataclass(frozen=True)
class Means:
    """Means over the samples of all ranks."""

    values: dict[str, float]
    samples: int = 0  # 0: unknown
    steps: int = 0
    seconds: float = 0.0


class FitLog:
    def __init__(self, model: keras.Model, session: RunSession) -> None:
        self._model, self._session, self._collective = model, session, session.collective
        self._sums_before: npt.NDArray[np.float64] | None = None  # at the last line; None: in an earlier epoch
        self._carried: npt.NDArray[np.float64] | None = None  # of the last epoch, since its last line
        self._steps_before = session.start.step
        self._seconds, self._last_time = 0.0, 0.0

    def count_time(self) -> None:
        now = time.perf_counter()
        self._seconds += now - self._last_time
        self._last_time = now

    def leave_out_time(self) -> None:
        self._last_time = time.perf_counter()

    def carry_over(self) -> None:
        """Keras resets the sums. Collective."""
        sums = self._sum_metrics()
        self._carried = sums if self._sums_before is None else sums - self._sums_before

    def end_epoch(self, step: int) -> None:
        if self._carried is None:
            self._sums_before, self._steps_before, self._seconds = None, step, 0.0
        else:
            self._sums_before, self._carried = -self._carried, None

    def take_means(self, step: int, logs: Mapping[str, Any]) -> Means:
        """Return means since the last line. Collective."""
        sums = self._sum_metrics()
        values, samples = self._read_metrics(sums if self._sums_before is None else sums - self._sums_before)
        if values.keys() != logs.keys() or not samples:  # a train_step that returns other values
            values = self._mean_over_ranks(scalars(logs))
        means = Means(values, samples, step - self._steps_before, self._seconds)
        self._sums_before, self._steps_before, self._seconds = sums, step, 0.0
        return means

    def write(self, means: Means, step: int, *, epoch: float, samples_seen: int) -> None:
        values = dict(means.values)
        if not hasattr(self._model.optimizer, "optimizers"):  # each part has its own
            values["lr"] = float(keras.ops.convert_to_numpy(self._model.optimizer.learning_rate))
        speed = {
            "examples_per_sec": round(means.samples / means.seconds, 1),
            "sec_per_step": round(means.seconds / means.steps, 6),
        }
        self._session.log("train", values | speed, step=step, epoch=round(epoch, 4), samples_seen=samples_seen)

    def read_validation(self, logs: Mapping[str, Any]) -> Means:
        """Return means of the validation, if any. Collective."""
        mine = {name.removeprefix("val_"): v for name, v in scalars(logs).items() if name.startswith("val_")}
        had = all_gather_object(self._collective, bool(mine), name="fit/validated")
        if not all(had):
            return Means(run_on_rank0(self._collective, lambda: mine, name="fit/validated_by_rank0"))
        values, samples = self._read_metrics(self._sum_metrics())  # still of that validation
        if not samples:
            return Means(self._mean_over_ranks(mine))
        return Means({name: value for name, value in values.items() if name in mine}, samples)

    def own(self) -> Arrays:
        sums = () if self._sums_before is None else self._sums_before
        return {
            "metrics/log": np.array([self._steps_before, *sums], np.float64),
            "metrics/seconds": np.array([self._seconds]),
        }

    def set_own(self, own: Arrays) -> None:
        if "metrics/log" not in own:
            return
        steps, *sums = own["metrics/log"]
        self._steps_before, self._sums_before = int(steps), np.array(sums) if sums else None
        self._seconds = float(own["metrics/seconds"][0])

    def _sum_metrics(self) -> npt.NDArray[np.float64]:
        """Sum all metrics' variables over all ranks, float64 [n]. Collective."""
        mine = [np.ravel(keras.ops.convert_to_numpy(v.value)).astype(np.float64) for v in metric_variables(self._model)]
        [total] = self._collective.all_reduce([tf.constant(np.concatenate([[0.0], *mine]))], name="fit/metrics")
        return np.asarray(total.numpy(), np.float64)[1:]

    def _read_metrics(self, sums: npt.NDArray[np.float64]) -> tuple[dict[str, float], int]:
        """Return metrics and number of samples for these sums, float64 [n]."""
        variables = metric_variables(self._model)
        if not variables:
            return {}, 0
        before = [keras.ops.convert_to_numpy(v.value) for v in variables]
        ends = np.cumsum([value.size for value in before])
        counts = [m.count for m in self._model.metrics if m.name == "loss" and isinstance(m, keras.metrics.Mean)]
        try:
            for variable, part in zip(variables, np.split(sums, ends[:-1]), strict=True):
                variable.assign(part.reshape(variable.shape).astype(variable.dtype))
            return scalars(self._model.get_metrics_result()), int(counts[0].numpy()) if counts else 0
        finally:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)

    def _mean_over_ranks(self, mine: dict[str, float]) -> dict[str, float]:
        """Return unweighted means. Collective."""
        of_ranks = all_gather_object(self._collective, mine, name="fit/values")
        return {name: float(np.mean([float(each[name]) for each in of_ranks])) for name in of_ranks[0]}


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if np.ndim(value) == 0}
