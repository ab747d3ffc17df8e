"""Distributed evaluation: each sample exactly once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective
from ringtrain.data.batches import Batches, PipelineBatches
from ringtrain.data.order import SampleOrder
from ringtrain.data.pipeline import Batch, local_batches
from ringtrain.data.sources import Source
from ringtrain.data.unreadable import explain_unreadable
from ringtrain.guard.labels import find_labels
from ringtrain.runtime import activity
from ringtrain.runtime.activity import Phase
from ringtrain.runtime.world import World
from ringtrain.step.optimizers import WeightAverages
from ringtrain.step.train_step import require_full_batch, trace
from ringtrain.workloads.base import Workload
from ringtrain.workloads.stateful_metrics import NO_METRICS, StatefulMetrics
from ringtrain.workloads.values import call_model, needs_every_rank, per_sample


class Evaluation(NamedTuple):
    step: EvalStep
    source: Source
    batches: Batches


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    samples: int
    loss: float  # data loss plus regularization, as in training
    data_loss: float  # mean of the samples' losses
    metrics: dict[str, float]

    @property
    def values(self) -> dict[str, float]:
        return {"loss": self.loss, "data_loss": self.data_loss, **self.metrics}


def evaluate(
    eval_step: EvalStep,
    batches: Batches,
    collective: Collective,
    *,
    is_stop_wanted: Callable[[], bool] = lambda: False,
) -> EvalReport | None:
    """Evaluate each sample exactly once. Collective.

    The report is equal on all ranks; None if any was asked to stop.
    """
    eval_step.begin()
    sums = np.zeros(2 + len(eval_step.metric_names))
    takes_long = not eval_step.was_called
    activity.set_phase(Phase.EVALUATION_DATA, 1, takes_long=takes_long)
    for number, batch in enumerate(batches, start=1):
        activity.set_phase(Phase.EVALUATION_STEP, number, takes_long=takes_long and number == 1)
        for labels in eval_step.labels if takes_long else ():
            labels.check(batch.y, batch.indices, of="evaluation")
        stop_votes, *batch_sums = eval_step(batch, is_stop_wanted())
        sums += batch_sums
        if stop_votes:
            return None
        activity.set_phase(Phase.EVALUATION_DATA, number + 1)
    samples, data_loss, *metrics = sums
    mean_values = {name: float(value / samples) for name, value in zip(eval_step.metric_names, metrics, strict=True)}
    stateful_values = eval_step.stateful_metrics.merge_and_reset(collective, name="evaluation/metrics")
    return EvalReport(
        samples=int(samples),
        loss=float(data_loss / samples + eval_step.regularization()),
        data_loss=float(data_loss / samples),
        metrics=mean_values | stateful_values,
    )


def evaluation_batches(
    source: Source,
    world: World,
    *,
    global_batch_size: int,
    num_threads: int,
    run_directory: Path | None = None,
) -> Batches:
    """Return this rank's batches of an evaluation.

    Args:
        source: of the samples.
        world: this process.
        global_batch_size: samples of a step over all ranks.
        num_threads: of the input pipeline.
        run_directory: for a list of unreadable samples.
    """
    order = SampleOrder(num_samples=source.num_samples, global_batch_size=global_batch_size, shuffle=False)
    steps: dict[str, Any] = {"first_step": 0, "end_step": order.steps_per_epoch}
    dataset = local_batches(source, order, world, **steps, num_threads=num_threads)
    explain = functools.partial(explain_unreadable, source, order, world, run_directory)
    return PipelineBatches(dataset, order, **steps, explain=explain)


class EvalStep:
    """Evaluates global batches, with averaged weights if available."""

    def __init__(
        self,
        *,
        workload: Workload,
        model: keras.Model,
        averages: WeightAverages,
        collective: Collective,
        batch_spec: Batch,
        row_state: Sequence[keras.Variable] = (),
        stateful_metrics: StatefulMetrics = NO_METRICS,
    ) -> None:
        """``row_state``: of the training step, which an evaluation leaves unchanged."""
        self.was_called = False
        self.stateful_metrics = stateful_metrics
        self._row_state = list(row_state)
        # An evaluation has its own rows, from the first values of the model on.
        self._first_rows = [variable.numpy() for variable in row_state]
        self._own_rows = [
            keras.Variable(rows, dtype=variable.dtype, trainable=False, name=variable.name)
            for rows, variable in zip(self._first_rows, row_state, strict=True)
        ]
        self._workload, self._model, self._averages, self._collective = workload, model, averages, collective
        self._needs_every_rank = needs_every_rank(workload, model)
        signature = [batch_spec, tf.TensorSpec([], tf.float64)]
        self._evaluate, self.metric_names = trace(self._sum_samples, signature)
        self.labels = find_labels(self._evaluate, batch_spec)
        self._join = tf.function(self._sum_empty_batch, input_signature=signature, autograph=False)

    def __call__(self, batch: Batch, is_stop_wanted: bool) -> np.ndarray:
        """Sum over all ranks: [stop_votes, samples, data_loss, *metrics], float64. Collective."""
        num_samples = batch.indices.shape[0]
        if num_samples:
            require_full_batch(num_samples, self._row_state)
        step = self._evaluate if batch.indices.shape[0] or self._needs_every_rank else self._join
        sums = step(batch, tf.constant(is_stop_wanted, tf.float64)).numpy()
        self.was_called = True
        return sums

    def begin(self) -> None:
        """Reset stateful metrics and the rows of stateful layers. Call it before an evaluation."""
        self.stateful_metrics.reset()
        for own, rows in zip(self._own_rows, self._first_rows, strict=True):
            own.assign(rows)

    def regularization(self) -> float:
        with self._averaged_weights():
            return float(sum(float(v.regularizer(v)) for v in self._model.trainable_variables if v.regularizer))

    def _averaged_weights(self) -> keras.StatelessScope:
        """In this scope the model reads the averages; its weights keep their values."""
        values = [(weight, average.value) for weight, average in self._averages.pairs]
        values += [(variable, own.value) for variable, own in zip(self._row_state, self._own_rows, strict=True)]
        return keras.StatelessScope(values)

    def _sum_samples(self, batch: Batch, stop_votes: tf.Tensor) -> tuple[tf.Tensor, tuple[str, ...]]:
        """Return sums over all ranks, and the names of the metrics."""
        with self._averaged_weights() as scope:
            outputs = call_model(self._workload, self._model, batch.x, training=False)
        for variable, own in zip(self._row_state, self._own_rows, strict=True):
            own.assign(scope.get_current_value(variable))
        losses, metrics = per_sample(self._workload, batch.y, outputs)
        self.stateful_metrics.update(batch.y, outputs)
        names = tuple(sorted(metrics))
        values = [tf.ones_like(losses), losses, *(metrics[name] for name in names)]
        return self._reduce([stop_votes, *(tf.reduce_sum(tf.cast(value, tf.float64)) for value in values)]), names

    def _sum_empty_batch(self, batch: Batch, stop_votes: tf.Tensor) -> tf.Tensor:
        nothing = tf.cast(tf.shape(batch.indices)[0], tf.float64)  # not constant: see LocalGradients.zero_gradients
        return self._reduce([stop_votes, *[nothing] * (2 + len(self.metric_names))])

    def _reduce(self, sums: list[tf.Tensor]) -> tf.Tensor:
        return self._collective.sum_in_order([tf.stack(sums)], name="evaluation").tensors[0]
