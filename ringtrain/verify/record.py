"""What one run of ``verify`` trained, written down: a process of the group that it starts for a world size."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.config import Config
from ringtrain.data.order import StreamingOrder
from ringtrain.data.pipeline import Batch
from ringtrain.errors import UsageError
from ringtrain.messages.defects import describe_defect, find_users_place
from ringtrain.step.report import StepReport
from ringtrain.step.train_step import set_precision
from ringtrain.training.actions import Action, Training
from ringtrain.training.creation import find_micro_batch_state
from ringtrain.training.job import Job, create_job
from ringtrain.training.loop import run_steps
from ringtrain.verify.compare import ROUNDING
from ringtrain.verify.precision import find_narrow, keep_narrow_layers, widened
from ringtrain.workloads.base import Workload

# Rank 0's first values must reach every rank: the others start from noise of this size.
NOISE = 1.0
HELD_TO_NARROW = "computes in {}, so that all values are compared within the rounding of that type"


class Recorder(Action):
    """Notes each step's loss and which samples it was really made of."""

    needs_weights = False

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.losses: list[float] = []
        self.samples: list[np.ndarray] = []

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return True

    def act(self, step: int, batch: Batch, report: StepReport) -> None:
        self.losses.append(report.loss)
        self.samples.append(self._job.collective.all_gather(batch.indices, name="ledger").numpy())


def record(
    workload: Workload, config: Config, collective: Collective, directory: Path, *, is_reference: bool = False
) -> None:
    """Train ``config.steps`` steps in float64, and one step in float32; rank 0 writes what came of it.

    The files are ``float64.npz`` and ``float32.npz``; ``ringtrain.verify.compare`` reads them. A reference also trains
    each from first weights that differ in their last bit, and ``float64-perturbed.npz`` and the other one say what came
    of that: how far rounding alone moves what is compared.
    """
    double = dataclasses.replace(config, precision="float64")
    record_widened(workload, double, collective, directory, is_reference=is_reference)
    # One step of plain SGD: a step of Adam would divide by gradients that are nothing but rounding.
    one_step = dataclasses.replace(config, precision="float32", steps=1, epochs=None)
    sgd = functools.partial(keras.optimizers.SGD, 1.0)
    record_widened(workload, one_step, collective, directory, is_reference=is_reference, optimizer=sgd)


def record_widened(
    workload: Workload, config: Config, collective: Collective, directory: Path, *, is_reference: bool, **options: Any
) -> None:
    """Record a run in which all computes in the settings' precision that can."""
    for widens_casts in (True, False):
        with widened(config.precision, widens_casts=widens_casts) as changed:
            try:
                job, notes = create_recorded_job(workload, config, collective, **options)
            except Exception:  # on all ranks, which trace the same code: it may need the types that it casts to
                if not changed:
                    raise
                continue
            return record_job(job, notes, directory, is_reference=is_reference)


def create_recorded_job(
    workload: Workload, config: Config, collective: Collective, *, freezes: bool = True, **job_options: Any
) -> tuple[Job, list[str]]:
    """A training in the settings' precision, without what differs between world sizes by design; what that was."""
    keras.utils.clear_session()
    notes: list[str] = []

    def adapt(model: keras.Model) -> None:
        set_precision(config.precision)  # create_model may have set another
        notes.extend(make_comparable(model, freezes=freezes))

    with explaining_float64(config):
        job = create_job(
            workload,
            config,
            collective,
            num_threads=1,
            adapt_model=adapt,
            **job_options,
        )
    notes += [
        f"{path}: each micro-batch of --accumulate updates it, and these differ between world sizes, so that weights "
        "and losses may differ as well"
        for path in find_micro_batch_state(config, job.step)
    ]
    order = job.plan.order
    if isinstance(order, StreamingOrder) and not order.is_shared:
        raise UsageError(
            "each rank of this workload is fed its own samples, so other world sizes train other batches: there is "
            "nothing to compare. To verify it, give the same samples by number (from_arrays, "
            "from_grain, or a Source of your own), or one dataset for all (from_dataset)."
        )
    if not collective.world.is_rank0:
        fill_with_noise(job.step.variables, seed=collective.world.rank)
    job.step.share_values(collective)
    return job, notes


@contextlib.contextmanager
def explaining_float64(config: Config) -> Iterator[None]:
    """Say what it is where the workload's own code, or a layer of its model, does not compute in float64."""
    try:
        yield
    except (TypeError, ValueError, tf.errors.InvalidArgumentError, tf.errors.NotFoundError) as error:
        words = [set(re.findall(r"\w+", line)) for line in str(error).splitlines()]
        speaks_of_types = any(said & {"float64", "double"} and said & {"float32", "float"} for said in words)
        if config.precision != "float64" or not speaks_of_types:
            raise
        place = find_users_place(error)
        raise UsageError(
            f"exactness is shown in float64, and {place or 'a layer of the model'} does not compute in it: "
            f"{describe_defect(error).removesuffix('.')}. "
            + (
                "Take types from what is given, such as tf.cast(value, outputs.dtype)."
                if place
                else "Verify the model without that layer."
            )
        ) from error


def record_job(job: Job, notes: Sequence[str], directory: Path, *, is_reference: bool = False) -> None:
    """Train, and write down what came of it; a reference once more, from weights that differ in their last bit."""
    first, slots = [variable.numpy() for variable in job.step.variables], job.step.gather_shared_out()
    narrow = find_narrow(job)
    computed_in = max(
        [job.config.precision, *(part.dtype for part in narrow)], key=lambda dtype: ROUNDING[dtype].tolerance
    )
    notes = [*notes, *(f"{part.where}: {HELD_TO_NARROW.format(part.dtype)}" for part in narrow)]
    train_recorded(job, notes, directory / f"{job.config.precision}.npz", computed_in)
    if is_reference and not job.batches.is_counted:
        for variable, value in zip(job.step.variables, first, strict=True):
            variable.assign(value)
        perturb(job.step.model.variables, computed_in)
        job.step.share_values(job.collective, slots)  # pieces as well, where the update is shared out
        train_recorded(job, notes, directory / f"{job.config.precision}-perturbed.npz", computed_in)


def train_recorded(job: Job, notes: Sequence[str], path: Path, computed_in: str) -> None:
    """Train the steps of a job; rank 0 writes down what came of it."""
    training = Training(job=job)
    recorder = Recorder(training)
    run_steps(training, [recorder])
    evaluation = job.evaluate()
    replicas = all_gather_object(job.collective, [digest(variable) for variable in job.step.variables], name="replicas")
    gathered = job.step.gather_shared_out()
    if not job.collective.world.is_rank0:
        return
    trained = {name: variable.numpy() for name, variable in job.step.named_variables.items()} | gathered
    values = {
        "notes": np.array(notes, str),
        "computed_in": np.array(computed_in),
        "losses": np.array(recorder.losses),
        "evaluation": np.array(
            [evaluation.samples, evaluation.loss, *evaluation.metrics.values()] if evaluation else []
        ),
        "samples": np.concatenate(recorder.samples),
        "samples_per_step": np.array([len(samples) for samples in recorder.samples]),
        "steps_per_epoch": job.plan.order.steps_per_epoch,
        "num_samples": 0 if isinstance(job.plan.order, StreamingOrder) else job.plan.order.num_samples,
        "variables": np.array([variable.path for variable in job.step.variables], str),
        "replicas": np.array(replicas, str),  # [ranks, variables]
        **{name: trained[name] for name in job.step.names},
    }
    np.savez(path, **values)


def make_comparable(model: keras.Model, *, freezes: bool = True) -> list[str]:
    """Switch off what may differ between world sizes by design (local BatchNorm if ``freezes``); say what that was."""
    notes = []
    keep_narrow_layers(model)
    for layer in model._flatten_layers():
        match_regularizers(layer)
        if type(layer).__name__ == "Equalization":
            call_without_training(layer)
            notes.append(f"{layer.name}: equalizes each rank's samples by themselves; switched off for the comparison")
        elif draws(layer):
            call_without_training(layer)
            notes.append(f"{layer.name}: its random draws differ by rank; switched off for the comparison")
        is_local_norm = isinstance(layer, keras.layers.BatchNormalization) and not hasattr(layer, "needs_every_rank")
        if freezes and is_local_norm:
            layer.trainable = False
            notes.append(
                f"{layer.name}: local BatchNorm normalises each rank's samples by themselves; frozen for the "
                "comparison (ringtrain.SyncBatchNormalization is exact)"
            )
    return notes


def match_regularizers(layer: keras.layers.Layer) -> None:
    """Give the factors of a layer's regularisers its type: Keras keeps them in that of the moment of their creation."""
    for regularizer in [value for name, value in vars(layer).items() if name.endswith("regularizer") and value]:
        for name, factor in vars(regularizer).items():
            if isinstance(factor, tf.Tensor) and factor.dtype.is_floating:
                setattr(regularizer, name, tf.cast(factor, layer.variable_dtype))


def draws(layer: keras.layers.Layer) -> bool:
    """Whether a layer itself draws random numbers in training: all of Keras' that do have a seed generator."""
    rates = [getattr(layer, name) for name in ("dropout", "recurrent_dropout") if hasattr(layer, name)]
    return bool(layer._seed_generators) and (not rates or any(rates))


def call_without_training(layer: keras.layers.Layer) -> None:
    """Let a layer compute as it does outside of training, where it draws nothing."""
    call = layer.call
    signature = inspect.signature(call)
    if "training" not in signature.parameters:
        raise UsageError(
            f"the layer {layer.name!r} ({type(layer).__name__}) draws random numbers in every call, so other world "
            "sizes train other things: there is nothing to compare. Give its call() a `training` argument, and let it "
            "draw only where that is true."
        )

    @functools.wraps(call)
    def call_outside_of_training(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["training"] = False
        return call(*bound.args, **bound.kwargs)

    layer.call = call_outside_of_training


def fill_with_noise(variables: Sequence[keras.Variable], *, seed: int) -> None:
    """Make all variables wrong, so that one which rank 0's values do not reach shows."""
    generator = np.random.default_rng(seed)
    for variable in variables:
        noise = generator.normal(scale=NOISE, size=variable.shape)
        is_float = tf.as_dtype(variable.dtype).is_floating
        variable.assign(tf.cast(noise if is_float else 100 * np.abs(noise) + 1, variable.dtype))


def perturb(variables: Sequence[keras.Variable], computed_in: str) -> None:
    """Change each number in the last bit of a type, up or down by chance."""
    generator = np.random.default_rng(1)
    for variable in variables:
        if variable.dtype in ("float32", "float64"):
            epsilon = max(ROUNDING[computed_in].epsilon, ROUNDING[variable.dtype].epsilon)
            signs = generator.choice([-1.0, 1.0], size=variable.shape)
            variable.assign(variable.value * (1 + signs * epsilon).astype(variable.dtype))


def digest(variable: keras.Variable) -> str:
    """A variable's bits, in short."""
    return hashlib.sha256(np.asarray(variable.numpy()).tobytes()).hexdigest()
