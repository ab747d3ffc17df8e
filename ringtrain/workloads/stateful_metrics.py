"""Keras metrics with a state, such as AUC, of a workload: exact over all ranks and batches of any size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective
from ringtrain.collectives.metric_states import (
    merge_states,
    merging_of,
    needs_trace,
    read_states,
    trace_merging,
    write_states,
)
from ringtrain.data.pipeline import Batch, describe_structure, with_batch_size
from ringtrain.errors import UsageError
from ringtrain.messages.defects import describe_defect
from ringtrain.workloads.base import Workload
from ringtrain.workloads.values import RESERVED_NAMES, as_computed, call_model


class StatefulMetrics:
    """The metrics of ``Workload.create_metrics``, whose states collect this rank's samples.

    Attributes:
        by_name: the metrics.
    """

    def __init__(self, by_name: Mapping[str, keras.metrics.Metric]) -> None:
        self.by_name = dict(by_name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.by_name)

    @property
    def variables(self) -> list[keras.Variable]:
        """The states of all metrics."""
        return [variable for metric in self.by_name.values() for variable in metric.variables]

    @property
    def facts(self) -> list[str]:
        """Facts that must be equal on all ranks, as states are merged by position."""
        facts = []
        for name, metric in self.by_name.items():
            shapes = [list(variable.shape) for variable in metric.variables]
            facts.append(f"{name} {type(metric).__name__} {shapes}")
        return facts

    def update(self, y: Any, outputs: Any) -> None:
        """Add samples to the states; in a graph, too."""
        targets, predictions = as_computed(y, outputs)
        for metric in self.by_name.values():
            metric.update_state(targets, predictions)

    def reset(self) -> None:
        """Forget all samples."""
        for metric in self.by_name.values():
            metric.reset_state()

    def merge_and_reset(self, collective: Collective, *, name: str) -> dict[str, float]:
        """Return the values over the samples of all ranks, and forget them. Collective."""
        if not self.by_name:
            return {}
        states = read_states(list(self.by_name.values()))
        write_states(merge_states(states, collective, name=name))
        values = {name: float(metric.result()) for name, metric in self.by_name.items()}
        self.reset()
        return values


NO_METRICS = StatefulMetrics({})


def create_stateful_metrics(
    workload: Workload, model: keras.Model, spec: Batch, *, batch_size: int | None
) -> StatefulMetrics:
    """Create the workload's metrics with their variables, and check that they can be merged.

    Args:
        workload: of the run.
        model: of the run.
        spec: of batches of any size.
        batch_size: of most batches, which a model with a fixed batch size needs; 0 or None if not known.

    Raises:
        UsageError: a metric has no single value, or a state that cannot be merged.
    """
    by_name = workload.create_metrics()
    owner = f"{type(workload).__name__}.create_metrics"
    is_mapping = isinstance(by_name, Mapping)
    if not is_mapping or not all(isinstance(metric, keras.metrics.Metric) for metric in by_name.values()):
        raise UsageError(
            f"{owner} gave {by_name!r:.80}; it must give a dict of names and Keras metrics, such as "
            "{'auc': keras.metrics.AUC()}; {} for none."
        )
    metrics = StatefulMetrics(by_name)
    if not by_name:
        return metrics
    taken = sorted(RESERVED_NAMES & set(by_name))
    if taken:
        raise UsageError(
            f"{owner} gives {taken[0]!r}, but metrics.jsonl keeps something else by that name. Choose another."
        )
    y, outputs = sample_of(workload, model, with_batch_size(spec, batch_size) if batch_size else spec)
    for name, metric in metrics.by_name.items():
        build_and_check(metric, y, outputs, where=f"{owner}: the metric {name!r}")
    return metrics


def sample_of(workload: Workload, model: keras.Model, spec: Batch) -> tuple[Any, Any]:
    """Return targets and outputs of one sample of zeros, of the types and shapes of a batch."""

    def compute(x: Any) -> Any:
        with keras.StatelessScope():
            return call_model(workload, model, x, training=False)

    outputs = tf.function(compute, autograph=False).get_concrete_function(spec.x).structured_outputs
    y, outputs = tf.nest.map_structure(_zeros_like, (spec.y, outputs))
    return as_computed(y, outputs)


def _zeros_like(spec: Any) -> tf.Tensor:
    """Return zeros [1, ...], with length 1 for unknown dimensions."""
    return tf.zeros([1, *(length or 1 for length in spec.shape[1:])], spec.dtype)


def build_and_check(metric: keras.metrics.Metric, y: Any, outputs: Any, *, where: str) -> None:
    """Create a metric's variables by an update with a sample, and check its merging and its value."""
    try:
        metric.update_state(y, outputs)
    except Exception as error:  # from a metric's own checks
        raise UsageError(
            f"{where} ({type(metric).__name__}) does not take y, {describe_structure(y)}, and the outputs, "
            f"{describe_structure(outputs)}: {describe_defect(error)} Derive a class from it whose update_state takes "
            "them, and calls that of the base class."
        ) from error
    if needs_trace(metric):
        trace_merging(metric, y, outputs)
    value = metric.result()
    metric.reset_state()
    merging = merging_of(metric)
    if merging.reason:
        raise UsageError(
            f"{where} ({type(metric).__name__}) has a state that cannot be merged over the ranks: {merging.reason}. "
            "Give its class merge_state(self, metrics), which adds the states of other metrics of the class to its own."
        )
    if isinstance(value, Mapping) or np.ndim(value) != 0:
        raise UsageError(
            f"{where} ({type(metric).__name__}) has no single value: its result is {value!r:.80}. Let it average, such "
            "as by average='macro', or give one metric for each value."
        )
