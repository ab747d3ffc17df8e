"""The metrics of a model, merged over ranks: the values that one process would log."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np

from ringtrain.collectives.metric_states import (
    MetricState,
    leaf_metrics,
    merging_of,
    needs_trace,
    read_states,
    watch_updates,
    write_states,
)
from ringtrain.keras.collective import log

MERGE_REMEDY = (
    "Write it as sums over the samples, or as a maximum or minimum, or give its class the method "
    "merge_state(metrics), which adds the states of other metrics of the class to its own."
)


def watch_metrics(model: keras.Model) -> None:
    """Find out in the next step how the states of user-defined metrics merge.

    Steps that an earlier ``fit`` has traced are traced again if they have such metrics.
    """
    watch_updates(model.metrics)
    if not any(map(needs_trace, leaf_metrics(model.metrics))):
        return
    if model.train_function is not None:
        model.make_train_function(force=True)
    if model.test_function is not None:
        model.make_test_function(force=True)


def read_metric_states(model: keras.Model) -> list[MetricState]:
    """Copy the states of all metrics of a model, in the order of ``metrics_variables``."""
    return read_states(leaf_metrics(model.metrics))


def read_results(model: keras.Model, states: Sequence[MetricState], *, num_ranks: int = 1) -> dict[str, float]:
    """Return the scalar results for these states, by the names of the logs.

    With several ranks, metrics whose states cannot be merged are left out, with one warning each.
    """
    unmergeable = []
    for state in states:
        reason = merging_of(state.metric).reason
        if reason and num_ranks > 1:
            unmergeable.append(state.metric)
            warn_of_unmergeable(state.metric.name, type(state.metric).__name__, reason)
    with _temporary_states(model, states), _without_results(unmergeable):
        return scalars(model.get_metrics_result())


def find_unmergeable(model: keras.Model) -> set[str]:
    """Return the names in the logs of metrics whose states cannot be merged."""
    metrics = [metric for metric in leaf_metrics(model.metrics) if merging_of(metric).reason]
    with _without_results(metrics):
        return {name for name, value in model.get_metrics_result().items() if value is LEFT_OUT}


def count_samples(states: Sequence[MetricState]) -> float | None:
    """Return the number of samples of Keras' mean of the loss; None if the model has none."""
    for state in states:
        metric = state.metric
        if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
            for variable, value in zip(metric.variables, state.values, strict=True):
                if variable is metric.count:
                    return float(value)
    return None


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers."""
    numbers = {}
    for name, value in values.items():
        if value is not LEFT_OUT and np.ndim(value) == 0:
            numbers[name] = float(value)
    return numbers


@functools.cache
def warn_of_unmergeable(name: str, class_name: str, reason: str) -> None:
    if hvd.rank() == 0:
        log.warning(
            "ringtrain.keras: the metric %r (%s) is left out of the values over all ranks: %s. %s",
            name,
            class_name,
            reason,
            MERGE_REMEDY,
        )


LEFT_OUT = object()  # the result of a metric that is left out


@contextmanager
def _temporary_states(model: keras.Model, states: Sequence[MetricState]) -> Iterator[None]:
    local_states = read_metric_states(model)
    write_states(states)
    try:
        yield
    finally:
        write_states(local_states)


@contextmanager
def _without_results(metrics: Sequence[keras.metrics.Metric]) -> Iterator[None]:
    """Make the results of these metrics recognizable: only the model knows their names in the logs."""
    for metric in metrics:
        object.__setattr__(metric, "result", lambda: LEFT_OUT)
    try:
        yield
    finally:
        for metric in metrics:
            object.__delattr__(metric, "result")
