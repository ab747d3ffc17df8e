"""What one run of ``verify`` trained, written down: a process of the group that it starts for a world size."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, gather_objects
from ringtrain.config import Config
from ringtrain.console import Console
from ringtrain.data.order import FedOrder
from ringtrain.data.pipeline import Batch
from ringtrain.errors import UsageError
from ringtrain.job import Job, create_job
from ringtrain.loop import run_steps
from ringtrain.nonfinite import NonfiniteGuard
from ringtrain.progress import Progress
from ringtrain.step_report import StepReport
from ringtrain.variables import is_seed_state, share_first_values
from ringtrain.workloads.base import Workload

# Rank 0's first values must reach every rank: the others start from noise of this size.
NOISE = 1.0


class Recorder:
    """Notes each step's loss and which samples it was really made of."""

    needs_weights = False

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self.losses: list[float] = []
        self.samples: list[np.ndarray] = []

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return True

    def act(self, step: int, batch: Batch, report: StepReport) -> None:
        self.losses.append(report.loss)
        self.samples.append(self._collective.gather(batch.indices, name="ledger").numpy())


def record(workload: Workload, config: Config, collective: Collective, directory: Path) -> None:
    """Train ``config.steps`` steps in float64, and one step in float32; rank 0 writes what came of it.

    The files are ``float64.npz`` and ``float32.npz``; ``ringtrain.verify`` reads them.
    """
    record_run(workload, dataclasses.replace(config, precision="float64"), collective, directory)
    # One step of plain SGD: a step of Adam would divide by gradients that are nothing but rounding.
    one_step = dataclasses.replace(config, precision="float32", steps=1, epochs=None)
    record_run(workload, one_step, collective, directory, optimizer=lambda: keras.optimizers.SGD(1.0))


def record_run(workload: Workload, config: Config, collective: Collective, directory: Path, **job_options: Any) -> None:
    """Train once, in the configuration's precision, and write down what came of it."""
    keras.utils.clear_session()
    notes: list[str] = []
    job = create_job(
        workload,
        config,
        collective,
        num_threads=1,
        adapt_model=lambda model: notes.extend(make_comparable(model)),
        **job_options,
    )
    if not collective.world.is_first:
        fill_with_noise(job.step.variables, seed=collective.world.rank)
    share_first_values(job.step.variables, collective)
    if isinstance(job.order, FedOrder):
        raise UsageError(
            "each rank of this workload is fed its own samples, so other world sizes train other batches: there is "
            "nothing to compare. Give the same samples by number (from_arrays, or a Source of your own) to verify it.",
            reach="run",
        )
    recorder = Recorder(collective)
    progress = Progress()
    run_steps(job, [recorder], NonfiniteGuard(job, Console(None, is_terminal=False), progress), progress)
    evaluation = record_evaluation(job)
    replicas = gather_objects(collective, [digest(variable) for variable in job.step.variables], name="replicas")
    if collective.world.is_first:
        weights = [v for v in job.step.model.variables if not is_seed_state(v)]
        np.savez(
            directory / f"{config.precision}.npz",
            notes=np.array(notes, str),
            losses=np.array(recorder.losses),
            evaluation=np.array(evaluation),
            samples=np.concatenate(recorder.samples),
            samples_per_step=np.array([len(samples) for samples in recorder.samples]),
            steps_per_epoch=job.order.steps_per_epoch,
            num_samples=job.order.num_samples,
            variables=np.array([variable.path for variable in job.step.variables], str),
            replicas=np.array(replicas, str),  # [ranks, variables]
            **named_values("weights", weights),
            **named_values("slots", [*job.step.optimizer.variables, *job.step.averages.variables]),
        )


def record_evaluation(job: Job) -> list[float]:
    """The evaluation after the last step: loss and metrics, or nothing."""
    result = job.evaluate()
    return [result.samples, result.loss, *result.metrics.values()] if result else []


def make_comparable(model: keras.Model) -> list[str]:
    """Switch off what may differ between world sizes by design, and say what that was."""
    notes = []
    for layer in model._flatten_layers():
        rates = [name for name in ("rate", "dropout", "recurrent_dropout", "stddev") if has_rate(layer, name)]
        for name in rates:
            setattr(layer, name, 0.0)
        if rates:
            notes.append(f"{layer.name}: its random draws differ by rank; switched off for the comparison")
        if isinstance(layer, keras.layers.BatchNormalization) and not is_synchronised(layer):
            layer.trainable = False
            notes.append(
                f"{layer.name}: local BatchNorm normalises each rank's samples by themselves; frozen for the "
                "comparison (ringtrain.keras.SyncBatchNormalization is exact)"
            )
    return notes


def has_rate(layer: keras.layers.Layer, name: str) -> bool:
    """Whether a layer draws random numbers at a positive rate of this name."""
    rate = getattr(layer, name, None)
    return isinstance(rate, float) and rate > 0 and any(is_seed_state(v) for v in layer.non_trainable_variables)


def is_synchronised(layer: keras.layers.BatchNormalization) -> bool:
    """Whether a BatchNorm layer uses the statistics of the global batch."""
    return type(layer).__name__ == "SyncBatchNormalization"


def fill_with_noise(variables: Sequence[keras.Variable], *, seed: int) -> None:
    """Make all variables wrong, so that one which rank 0's values do not reach shows."""
    generator = np.random.default_rng(seed)
    for variable in variables:
        noise = generator.normal(scale=NOISE, size=variable.shape)
        is_float = tf.as_dtype(variable.dtype).is_floating
        variable.assign(tf.cast(noise if is_float else 100 * np.abs(noise) + 1, variable.dtype))


def named_values(prefix: str, variables: Sequence[keras.Variable]) -> dict[str, Any]:
    """Values by names that keep the order of the variables."""
    return {f"{prefix}/{number:04d}/{v.path}": np.asarray(v.numpy()) for number, v in enumerate(variables)}


def digest(variable: keras.Variable) -> str:
    """A variable's bits, in short."""
    return hashlib.sha256(np.asarray(variable.numpy()).tobytes()).hexdigest()
