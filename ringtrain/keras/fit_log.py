"""Log of a ``fit`` with a run directory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from ringtrain.collectives import all_gather_object, run_on_rank0
from ringtrain.collectives.metric_states import (
    MetricState,
    leaf_metrics,
    merge_states,
    merging_of,
    require_same_list,
    require_same_metrics,
)
from ringtrain.keras.merged_metrics import (
    count_samples,
    find_unmergeable,
    read_metric_states,
    read_results,
    scalars,
)
from ringtrain.keras.rank_state import Arrays
from ringtrain.training.session import RunSession

Vector = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Means:
    """Values over the samples of all ranks: of a maximum or minimum, over the samples of the epoch so far."""

    values: dict[str, float]
    samples: int = 0  # 0: unknown
    steps: int = 0
    seconds: float = 0.0


class FitLog:
    """The lines of a ``fit``: means over the samples since the line before."""

    def __init__(self, model: keras.Model, session: RunSession) -> None:
        self._model = model
        self._session = session
        self._collective = session.collective
        self._sums_before: Vector | None = None  # merged sums at the last line; None: in an earlier epoch
        self._carried: Vector | None = None  # sums of the last epoch since its last line
        self._steps_before = session.start.step
        self._seconds = 0.0
        self._last_time = 0.0
        self._are_metrics_compared = False
        self._are_logs_compared = False

    def count_time(self) -> None:
        now = time.perf_counter()
        self._seconds += now - self._last_time
        self._last_time = now

    def leave_out_time(self) -> None:
        self._last_time = time.perf_counter()

    def carry_over(self) -> None:
        """Keep the sums of an epoch, which Keras resets. Collective."""
        self._carried = self._since_last_line(_sums(self._merge()))

    def end_epoch(self, step: int) -> None:
        if self._carried is None:
            self._sums_before = None
            self._steps_before = step
            self._seconds = 0.0
        else:
            self._sums_before = -self._carried
            self._carried = None

    def take_means(self, step: int, logs: Mapping[str, Any]) -> Means:
        """Return the values since the last line. Collective."""
        merged = self._merge()
        self._compare_names(logs)
        sums = _sums(merged)
        since_last_line = _with_sums(merged, self._since_last_line(sums))
        samples = round(count_samples(since_last_line) or 0)
        values = self._values_of(scalars(logs), since_last_line, samples=samples)
        means = Means(values, samples, step - self._steps_before, self._seconds)
        self._sums_before = sums
        self._steps_before = step
        self._seconds = 0.0
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
        """Return the values of the validation, if any. Collective."""
        local_values = {}
        for name, value in scalars(logs).items():
            if name.startswith("val_"):
                local_values[name.removeprefix("val_")] = value
        had = all_gather_object(self._collective, bool(local_values), name="fit/validated")
        if not all(had):
            return Means(run_on_rank0(self._collective, lambda: local_values, name="fit/validated_by_rank0"))
        names = sorted(local_values)
        kind = "validation metrics"
        require_same_list(names, names, self._collective, name="fit/validation", kind=kind)
        merged = self._merge()  # Keras has not reset the states of that validation
        samples = round(count_samples(merged) or 0)
        return Means(self._values_of(local_values, merged, samples=samples), samples)

    def own(self) -> Arrays:
        """Return what a checkpoint keeps of the log."""
        saved = [np.array([self._steps_before], np.float64)]
        if self._sums_before is not None:
            saved.append(self._sums_before)
        return {
            "metrics/log": np.concatenate(saved),
            "metrics/seconds": np.array([self._seconds]),
        }

    def set_own(self, own: Arrays) -> None:
        if "metrics/log" not in own:
            return
        saved = own["metrics/log"]
        self._steps_before = int(saved[0])
        self._sums_before = None
        if saved.size > 1:
            self._sums_before = saved[1:]
        self._seconds = float(own["metrics/seconds"][0])

    def _merge(self) -> list[MetricState]:
        """Merge the metrics' states of all ranks. Collective."""
        if not self._are_metrics_compared:
            metrics = leaf_metrics(self._model.metrics)
            require_same_metrics(metrics, self._collective, name="fit/metric_names")
            self._are_metrics_compared = True
        return merge_states(read_metric_states(self._model), self._collective, name="fit/metrics")

    def _read(self, states: Sequence[MetricState]) -> dict[str, float]:
        return read_results(self._model, states, num_ranks=self._collective.world.size)

    def _since_last_line(self, sums: Vector) -> Vector:
        if self._sums_before is None:
            return sums
        return sums - self._sums_before

    def _values_of(
        self,
        logs: Mapping[str, float],
        states: Sequence[MetricState],
        *,
        samples: int,
    ) -> dict[str, float]:
        """Return the values over all ranks of what a step has returned. Collective.

        A value that is no metric's result, such as one of a user-defined ``train_step``, is averaged over the ranks.

        Args:
            logs: this rank's values, of names that are equal on all ranks.
            states: merged.
            samples: over all ranks; 0 if the step has updated no metric.
        """
        values: dict[str, float] = {}
        merged: dict[str, float] = {}
        if samples:
            merged = self._read(states)
        unmergeable: set[str] = set()
        if self._collective.world.size > 1:
            unmergeable = find_unmergeable(self._model)
        others = {}
        for name, value in logs.items():
            if name in merged:
                values[name] = merged[name]
            elif name not in unmergeable:
                others[name] = value
        if others:
            values |= self._mean_over_ranks(others)
        return values

    def _compare_names(self, logs: Mapping[str, Any]) -> None:
        """Compare the names in the first logs between ranks. Collective."""
        if not self._are_logs_compared:
            names = sorted(scalars(logs))
            kind = "values in the logs"
            require_same_list(names, names, self._collective, name="fit/logs", kind=kind)
            self._are_logs_compared = True

    def _mean_over_ranks(self, local_values: dict[str, float]) -> dict[str, float]:
        """Return unweighted means. Collective."""
        values_by_rank = all_gather_object(self._collective, local_values, name="fit/values")
        means = {}
        for name in values_by_rank[0]:
            means[name] = float(np.mean([float(values[name]) for values in values_by_rank]))
        return means


def _sums(states: Sequence[MetricState]) -> Vector:
    """Return all values as one vector, float64 [n]. Only those that are sums are subtracted later."""
    parts = [np.zeros(0)]
    for state in states:
        for value in state.values:
            parts.append(np.ravel(value).astype(np.float64))
    return np.concatenate(parts)


def _with_sums(states: Sequence[MetricState], sums: Vector) -> list[MetricState]:
    """Replace the values that are sums by those of a vector of ``_sums``."""
    replaced = []
    for state in states:
        values = []
        for value in state.values:
            values.append(sums[: value.size].reshape(value.shape))
            sums = sums[value.size :]
        if not merging_of(state.metric).is_sum:
            values = state.values
        replaced.append(MetricState(state.metric, values))
    return replaced
