"""A model's metrics over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.keras.rank_state import metric_variables


class MetricsOverRanks:
    def __init__(self, model: keras.Model, collective: Collective) -> None:
        self._model, self._collective = model, collective

    def sum(self) -> npt.NDArray[np.float64]:
        """Sum all metrics' variables over all ranks, float64 [n]. Collective."""
        mine = [np.ravel(keras.ops.convert_to_numpy(v.value)).astype(np.float64) for v in metric_variables(self._model)]
        [total] = self._collective.all_reduce([tf.constant(np.concatenate([[0.0], *mine]))], name="fit/metrics")
        return np.asarray(total.numpy(), np.float64)[1:]

    def read(self, sums: npt.NDArray[np.float64]) -> tuple[dict[str, float], int]:
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
            results = scalars(self._model.get_metrics_result())
            samples = int(counts[0].numpy()) if counts else 0
        finally:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
        return results, samples

    def mean_over_ranks(self, mine: dict[str, float]) -> dict[str, float]:
        """Return unweighted means. Collective."""
        of_ranks = all_gather_object(self._collective, mine, name="fit/values")
        return {name: float(np.mean([float(each[name]) for each in of_ranks])) for name in of_ranks[0]}


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if np.ndim(value) == 0}
