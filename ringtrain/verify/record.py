"""One run of ``verify``, in a process for a world size."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.config import Config
from ringtrain.data.pipeline import Batch
from ringtrain.errors import UsageError
from ringtrain.guard.preflight import draws
from ringtrain.messages.defects import describe_defect, find_users_place
from ringtrain.runtime.private import all_layers
from ringtrain.step.assignments import states_of_stateful_layers
from ringtrain.step.report import StepReport
from ringtrain.step.state import is_integer_or_bool
from ringtrain.step.train_step import TrainStep, set_precision
from ringtrain.training.actions import Action, Ending
from ringtrain.training.creation import find_micro_batch_state, find_own_steps
from ringtrain.training.job import Job, create_job
from ringtrain.training.loop import run_steps
from ringtrain.training.plan import own_augment
from ringtrain.training.session import RunSession
from ringtrain.verify.compare import ROUNDING
from ringtrain.verify.draws import SharedDraws, share_draws_of_loss
from ringtrain.verify.precision import find_narrow, keep_narrow_layers, widened
from ringtrain.verify.probes import depends_on_other_samples, digest, draws_by_rank, try_nonfinite
from ringtrain.verify.trials import (
    BEGINNING,
    BEGINNING_STEPS,
    MICRO_BATCHES,
    Trial,
    lossy_type,
    plan_trials,
    without_micro_batches,
)
from ringtrain.workloads.base import Workload

# In other ranks' initial values, to test rank 0's broadcast.
NOISE = 1.0
OWN_MICRO_BATCHES = "compares the samples of a micro-batch, so that with --accumulate world sizes may differ"
SWITCHED_OFF = "its random draws differ by rank; switched off for the comparison"
SHARED = "its random draws differ by rank; for the comparison all samples get the same ones"
NEVER_CALLED = "never called; a step here is the workload's loss, metrics and optimizer (train such a model by fit)"
HELD_TO_NARROW = "computes in {}, so that all values are compared within the rounding of that type"


class Recorder(Action):
    def __init__(self, job: Job, session: RunSession, max_steps: int | None) -> None:
        super().__init__(job, session)
        self._max_steps = max_steps
        self.losses: list[float] = []
        self.samples: list[np.ndarray] = []
        self.beginning: dict[str, np.ndarray] = {}
        self.last_batch: Batch | None = None

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return True

    def act(self, step: int, batch: Batch, report: StepReport) -> Ending | None:
        self.losses.append(report.loss)
        self.samples.append(self._job.collective.all_gather(batch.indices, name="ledger").numpy())
        self.last_batch = batch
        if step <= BEGINNING_STEPS:
            self.beginning = gather_values(self._job.step)
        return Ending.EARLY if step == self._max_steps else None


def record(
    workload: Workload, config: Config, collective: Collective, directory: Path, *, is_reference: bool = False
) -> None:
    """Train all trials; rank 0 writes ``NAME.npz``.

    A reference also writes ``NAME-perturbed.npz``, from weights changed in their last bit, to measure rounding.
    """
    why_no_micro_batches = ""
    for trial in plan_trials(config, is_reference=is_reference):
        if trial.config.accumulate != config.accumulate and why_no_micro_batches:
            write_skipped(dataclasses.replace(trial, name=MICRO_BATCHES), why_no_micro_batches, collective, directory)
            trial = without_micro_batches(trial, config)
        try:
            step = record_trial(workload, trial, collective, directory, is_reference=is_reference)
        except UsageError as error:  # on all ranks, for example an update that cannot be sharded
            if trial.reference != BEGINNING:
                raise
            write_skipped(trial, str(error), collective, directory)
            continue
        if step.local_gradients.needs_every_rank:
            why_no_micro_batches = "the samples of a micro-batch are compared with each other, and with no others"
        elif [v for v in step.state if not is_integer_or_bool(v)]:
            why_no_micro_batches = "each micro-batch would update state of the model"


def record_trial(
    workload: Workload, trial: Trial, collective: Collective, directory: Path, *, is_reference: bool
) -> TrainStep:
    """Record a trial, with widened types if its code permits."""
    for widens in (True, False):
        with contextlib.ExitStack() as scope:
            changed: list[str] = []
            if not trial.is_lossy:
                changed = scope.enter_context(widened(trial.config.precision, widens_casts=widens))
            try:
                job, notes = create_recorded_job(workload, trial, collective)
            except Exception:  # on all ranks: the code may need the types of its casts
                if not changed:
                    raise
                continue
            record_job(job, notes, directory, trial, is_reference=is_reference)
            return job.step
    raise AssertionError("without widened casts it either returns or raises")


def write_skipped(trial: Trial, reason: str, collective: Collective, directory: Path) -> None:
    if collective.world.is_rank0:
        np.savez(directory / f"{trial.name}.npz", words=np.array(trial.words), skipped=np.array(reason))


def create_recorded_job(
    workload: Workload, trial: Trial, collective: Collective, *, freezes: bool = True
) -> tuple[Job, list[str]]:
    """Return a job without known differences between world sizes, and notes about them."""
    keras.utils.clear_session()
    notes: list[str] = []
    used_draws: list[SharedDraws] = []
    shared_workload: Any = copy.copy(workload)
    config = trial.config
    if trial.is_vector:
        collective = copy.copy(collective)
        collective.list_types = ()

    def adapt(model: keras.Model) -> None:
        if not trial.is_lossy:
            set_precision(config.precision)  # create_model may have set another
        refuse_row_state(states_of_stateful_layers(model))
        draws = SharedDraws(model)
        used_draws.append(draws)
        model.call = draws.wrap(model.call)
        share_draws_of_loss(shared_workload, draws)
        notes.extend(make_comparable(model, freezes=freezes))
        notes.extend(f"{name}: {NEVER_CALLED}" for name in find_own_steps(model))

    with explaining_float64(config):
        job = create_job(
            shared_workload,
            config,
            collective,
            num_threads=1,
            adapt_model=adapt,
            optimizer=functools.partial(keras.optimizers.SGD, 1.0) if trial.is_plain else None,
            in_groups=trial.in_groups,
        )
    refuse_row_state(job.step.row_state)
    notes = describe_draws(notes, used_draws[0].places)
    if trial.lossy:
        notes.append(f"{trial.lossy}: what it rounds grows from step to step, so that one step of it is compared")
    if config.accumulate > 1 and workload.needs_every_rank:
        notes.append(f"{type(workload).__name__}.loss: {OWN_MICRO_BATCHES}")
    notes += [
        f"{path}: each micro-batch of --accumulate updates it, and these differ between world sizes, so that weights "
        "and losses may differ as well"
        for path in find_micro_batch_state(config, job.step)
    ]
    if job.plan.order.depends_on_ranks:
        raise UsageError(
            "each rank of this workload is fed its own samples, so other world sizes train other batches: nothing "
            "can be compared. To verify it, give the same samples by number (from_arrays, "
            "from_grain, or a Source of your own), or one dataset for all (from_dataset)."
        )
    if not collective.world.is_rank0:
        fill_with_noise(job.step.variables, seed=collective.world.rank)
    job.step.share_values(collective)
    return job, notes


def describe_draws(notes: Sequence[str], places: Sequence[str]) -> list[str]:
    """Return the notes, with what was done about the draws at these places."""
    switched_off = {f"{place}: {SWITCHED_OFF}" for place in places}
    kept = [note for note in notes if note not in switched_off]
    return kept + [f"{place}: {SHARED}" for place in places]


def refuse_row_state(row_state: Sequence[keras.Variable]) -> None:
    """Raise UsageError for a model whose batches continue the rows of earlier ones."""
    if row_state:
        raise UsageError(
            f"{row_state[0].path} holds the state of the rows of each rank's batches, and these are other rows in "
            "each world size: nothing can be compared. To verify the rest of the model, create the layer with "
            "stateful=False for this."
        )


@contextlib.contextmanager
def explaining_float64(config: Config) -> Iterator[None]:
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


def record_job(job: Job, notes: Sequence[str], directory: Path, trial: Trial, *, is_reference: bool = False) -> None:
    """A reference also trains perturbed weights."""
    first, slots = [variable.numpy() for variable in job.step.variables], job.step.gather_shared_out()
    narrow = [] if trial.is_lossy else find_narrow(job)
    types = [lossy_type(trial.config)] if trial.is_lossy else [trial.config.precision, *(n.dtype for n in narrow)]
    computed_in = max(types, key=lambda dtype: ROUNDING[dtype].tolerance)
    facts = {
        "notes": np.array([*notes, *(f"{part.where}: {HELD_TO_NARROW.format(part.dtype)}" for part in narrow)], str),
        "computed_in": np.array(computed_in),
        "words": np.array(describe_path(job.step, trial)),
        "reference": np.array(trial.reference),
        "has_augment": np.array(own_augment(job.workload) is not None),
    }
    if is_reference and trial.name == "float64":
        facts["draws_by_rank"] = np.array(draws_by_rank(job, ROUNDING[computed_in].tolerance))
        facts["depends_on_other_samples"] = np.array(depends_on_other_samples(job, ROUNDING[computed_in].tolerance))
    train_recorded(job, facts, directory / f"{trial.name}.npz", trial)
    if is_reference and job.batches.can_begin_again:
        for variable, value in zip(job.step.variables, first, strict=True):
            variable.assign(value)
        perturb(job.step.model.variables, computed_in)
        job.step.share_values(job.collective, slots)
        train_recorded(job, facts, directory / f"{trial.name}-perturbed.npz", trial)


def describe_path(step: TrainStep, trial: Trial) -> str:
    """Describe the code path; sparse gradients are always sent by rows."""
    types = [trial.config.precision] if not trial.is_lossy else []
    return ", ".join([*types, trial.words, *(["sparse gradients by rows"] if step.has_sparse_gradients else [])])


def train_recorded(job: Job, facts: Mapping[str, Any], path: Path, trial: Trial) -> None:
    """Write results of all and of the first steps, on rank 0."""
    session = RunSession(job.config, job.collective)
    recorder = Recorder(job, session, trial.max_steps)
    run_steps(job, session, [recorder])
    evaluation = None if trial.max_steps else job.evaluate()
    num_evaluated = -1
    if job.evaluation is not None and evaluation is not None:
        num_evaluated = job.evaluation.source.num_samples
    replicas = all_gather_object(job.collective, [digest(variable) for variable in job.step.variables], name="replicas")
    trained = gather_values(job.step)
    nonfinite = try_nonfinite(job, recorder.last_batch) if trial.is_plain else None
    if not job.collective.world.is_rank0:
        return
    values = {
        **facts,
        "losses": np.array(recorder.losses),
        "evaluation": np.array(
            [evaluation.samples, evaluation.loss, *evaluation.metrics.values()] if evaluation else []
        ),
        "samples": np.concatenate(recorder.samples),
        "samples_per_step": np.array([len(samples) for samples in recorder.samples]),
        "steps_per_epoch": job.plan.order.steps_per_epoch,
        "num_evaluated": num_evaluated,
        "global_batch_size": job.plan.order.global_batch_size,
        "num_samples": job.plan.order.known_samples or 0,
        "variables": np.array([variable.path for variable in job.step.variables], str),
        "replicas": np.array(replicas, str),  # [ranks, variables]
        **({"nonfinite": np.array(nonfinite, str)} if nonfinite is not None else {}),
        **{name: trained[name] for name in job.step.names},
    }
    np.savez(path, **values)
    if trial.name == "float64":
        begun = len(recorder.losses[:BEGINNING_STEPS])
        per_step = values["samples_per_step"][:begun]
        first = {
            "losses": values["losses"][:begun],
            "evaluation": np.array([]),
            "samples": values["samples"][: sum(per_step)],
            "samples_per_step": per_step,
            **{name: recorder.beginning[name] for name in job.step.names},
        }
        np.savez(path.with_name(path.name.replace(trial.name, BEGINNING)), **values | first)


def gather_values(step: TrainStep) -> dict[str, np.ndarray]:
    """Return all values; whole sharded slots on rank 0 only. Collective."""
    return {name: variable.numpy() for name, variable in step.named_variables.items()} | step.gather_shared_out()


def make_comparable(model: keras.Model, *, freezes: bool = True) -> list[str]:
    """Disable known differences between world sizes (local BatchNorm if ``freezes``); return notes."""
    notes = []
    keep_narrow_layers(model)
    for layer in all_layers(model):
        match_regularizers(layer)
        if type(layer).__name__ == "Equalization":
            call_without_training(layer)
            notes.append(f"{layer.name}: equalizes each rank's samples by themselves; switched off for the comparison")
        elif draws(layer) and "training" in inspect.signature(layer.call).parameters:
            call_without_training(layer)
            notes.append(f"{layer.name}: {SWITCHED_OFF}")
        is_local_norm = isinstance(layer, keras.layers.BatchNormalization) and not hasattr(layer, "needs_every_rank")
        if freezes and is_local_norm and layer.trainable:
            layer.trainable = False
            notes.append(
                f"{layer.name}: local BatchNorm normalises each rank's samples by themselves; frozen for the "
                "comparison (ringtrain.SyncBatchNormalization is exact)"
            )
    return notes


def match_regularizers(layer: keras.layers.Layer) -> None:
    """Cast regularization factors, for which Keras keeps the type of their creation."""
    for regularizer in [value for name, value in vars(layer).items() if name.endswith("regularizer") and value]:
        for name, factor in vars(regularizer).items():
            if isinstance(factor, tf.Tensor) and factor.dtype.is_floating:
                setattr(regularizer, name, tf.cast(factor, layer.variable_dtype))


def call_without_training(layer: keras.layers.Layer) -> None:
    call = layer.call
    signature = inspect.signature(call)

    @functools.wraps(call)
    def call_outside_of_training(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["training"] = False
        return call(*bound.args, **bound.kwargs)

    layer.call = call_outside_of_training


def fill_with_noise(variables: Sequence[keras.Variable], *, seed: int) -> None:
    """Show a missing broadcast."""
    generator = np.random.default_rng(seed)
    for variable in variables:
        noise = generator.normal(scale=NOISE, size=variable.shape)
        is_float = tf.as_dtype(variable.dtype).is_floating
        variable.assign(tf.cast(noise if is_float else 100 * np.abs(noise) + 1, variable.dtype))


def perturb(variables: Sequence[keras.Variable], computed_in: str) -> None:
    """Change each number in its last bit, at random."""
    generator = np.random.default_rng(1)
    for variable in variables:
        if variable.dtype in ("float32", "float64"):
            epsilon = max(ROUNDING[computed_in].epsilon, ROUNDING[variable.dtype].epsilon)
            signs = generator.choice([-1.0, 1.0], size=variable.shape)
            variable.assign(variable.value * (1 + signs * epsilon).astype(variable.dtype))
