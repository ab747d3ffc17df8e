"""Evaluation by all ranks together: each sample exactly once, whatever the sizes."""

from __future__ import annotations

from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective
from ringtrain.data.order import SampleOrder
from ringtrain.data.pipeline import Batch, local_batches
from ringtrain.data.sources import Source
from ringtrain.workloads.base import Workload
from ringtrain.workloads.values import per_sample


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """An evaluation over the exact evaluation data.

    Attributes:
        samples: how many samples were evaluated, each once.
        loss: mean data loss plus regularisation, comparable with the training's ``loss``.
        data_loss: mean of the samples' losses.
        metrics: means of the workload's metrics.
    """

    samples: int
    loss: float
    data_loss: float
    metrics: dict[str, float]


def evaluate(
    eval_step: EvalStep, source: Source, collective: Collective, *, global_batch_size: int, num_threads: int
) -> EvalReport:
    """Evaluate each sample of a source exactly once, each rank its share. Every rank must call it."""
    order = SampleOrder(num_samples=source.num_samples, global_batch_size=global_batch_size, shuffle=False)
    batches = local_batches(
        source, order, collective.world, first_step=0, end_step=order.steps_per_epoch, num_threads=num_threads
    )
    sums = np.zeros(2 + len(eval_step.metric_names))
    for batch in batches:
        sums += eval_step(batch)
    [total] = collective.sum([tf.constant(sums, tf.float64)], name="evaluation")
    samples, data_loss, *metrics = total.numpy()
    return EvalReport(
        samples=int(samples),
        loss=float(data_loss / samples + eval_step.regularization()),
        data_loss=float(data_loss / samples),
        metrics={name: float(value / samples) for name, value in zip(eval_step.metric_names, metrics, strict=True)},
    )


class EvalStep:
    """Evaluates the model on a rank's share of a batch."""

    def __init__(self, *, workload: Workload, model: keras.Model, batch_spec: Batch) -> None:
        """Trace the step; ``batch_spec`` holds the tensor specs of a batch (``dataset.element_spec``)."""
        self.metric_names: tuple[str, ...] = ()
        self._workload, self._model = workload, model
        self._evaluate = tf.function(self._sum_samples, input_signature=[batch_spec], autograph=False)
        self._evaluate.get_concrete_function()

    def __call__(self, batch: Batch) -> np.ndarray:
        """Sums over this rank's samples: [samples, data_loss, *metrics], float64."""
        if not batch.indices.shape[0]:
            return np.zeros(2 + len(self.metric_names))
        return self._evaluate(batch).numpy()

    def regularization(self) -> float:
        """The model's regularisation losses, which do not depend on samples."""
        return float(sum(float(v.regularizer(v)) for v in self._model.trainable_variables if v.regularizer))

    def _sum_samples(self, batch: Batch) -> tf.Tensor:
        losses, metrics = per_sample(self._workload, batch.y, self._model(batch.x, training=False))
        self.metric_names = tuple(sorted(metrics))
        values = [tf.ones_like(losses), losses, *(metrics[name] for name in self.metric_names)]
        return tf.stack([tf.reduce_sum(tf.cast(value, tf.float64)) for value in values])
