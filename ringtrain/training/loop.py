"""The training loop: ``train``, then its parts in the order of their calls."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from ringtrain.collectives import run_on_rank0
from ringtrain.data.pipeline import Batch
from ringtrain.errors import RingtrainError
from ringtrain.guard.causes import explaining_lost_ranks
from ringtrain.guard.contents import digest_contents, find_other_contents
from ringtrain.guard.labels import CHECKED_STEPS
from ringtrain.run.directory import find_events
from ringtrain.runtime import activity
from ringtrain.runtime.activity import Phase
from ringtrain.training.actions import (
    Action,
    CheckReplicas,
    Ending,
    Evaluate,
    Log,
    Profile,
    Save,
    gather_state,
)
from ringtrain.training.calls import Calls
from ringtrain.training.evaluation import EvalReport
from ringtrain.training.job import Job, create_job
from ringtrain.training.joining import Prepared
from ringtrain.training.nonfinite import NonfiniteGuard
from ringtrain.training.row_state import restore_row_state
from ringtrain.training.saving import restore
from ringtrain.training.session import RunSession
from ringtrain.training.weights import take_weights


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a training run."""

    ending: Ending
    evaluation: EvalReport | None  # last of this process
    best: float | None = None  # value of ``best_metric``
    best_step: int | None = None


def train(prepared: Prepared, session: RunSession) -> Result:
    """Train from the start of the run or its checkpoint. Collective."""
    job = create_job(
        prepared.workload,
        prepared.config,
        session.collective,
        num_threads=prepared.plan.intra_op_threads,
        start=session.start,
    )
    progress, console = session.progress, session.console
    set_initial_values(job, session)
    describe(job, session)
    check, evaluate, profile = CheckReplicas(job, session), Evaluate(job, session), Profile(job, session)
    check.act(job.plan.first_step)
    session.leave_if_requested()
    session.begin(global_batch_size=job.plan.order.global_batch_size, samples=job.plan.order.num_samples)
    console.start_progress(job.plan.known_total_steps, job.plan.first_step, lambda: session.last_saved_step)
    # The check precedes everything that saves; the checkpoint is last, as it contains the others' results.
    actions = [profile, Log(job, session), check, evaluate, Save(job, session)]
    try:
        profile.begin()
        with explaining_lost_ranks():  # before cleanup changes this rank's phase
            step, ending = run_steps(job, session, actions)
            profile.close()  # if the run ends within the profile
    except BaseException:
        session.requests.end_training()
        raise
    finally:
        with contextlib.suppress(RingtrainError):
            profile.close(on_all=False)  # a running profile means that this rank failed
        console.stop_progress()
    check.act(step)
    finish(job, session, step, ending)
    best_step = progress.best_step if progress.best is not None else None
    return Result(ending=ending, evaluation=evaluate.last, best=progress.best, best_step=best_step)


def set_initial_values(job: Job, session: RunSession) -> None:
    """Restore or initialize on rank 0, then broadcast."""
    checkpoint = session.checkpoint

    def set_on_rank0() -> tuple[bool, list[str]]:
        if checkpoint is not None:
            restore(job, checkpoint)
            return True, []
        return False, take_weights(job, job.config.init_from) if job.config.init_from is not None else []

    activity.set_phase(Phase.RESTORE, takes_long=True)
    is_restored, lines = run_on_rank0(job.collective, set_on_rank0, name="first_values")
    for line in lines:
        session.console.line(line)
    slots = checkpoint.variables if checkpoint is not None else {}
    job.step.share_values(job.collective, slots if is_restored else None)
    if is_restored:
        restore_row_state(
            job.collective,
            job.step.named_row_state,
            checkpoint,
            former_size=session.start.size or job.collective.world.size,
        )


def describe(job: Job, session: RunSession) -> None:
    order, size, line = job.plan.order, job.collective.world.size, session.console.line
    evaluated = f", {job.evaluation.source.num_samples:,} to evaluate on" if job.evaluation else ""
    samples = f"{order.describe_samples()}{evaluated}"
    line(f"{job.config.workload}: {job.step.model.count_params():,} parameters; {samples}")
    length = f"{order.steps_per_epoch} steps an epoch, {job.plan.total_steps} in all"
    if not order.has_known_length:
        length = "one pass of unknown length"
    line(f"global batch {order.global_batch_size} over {size} rank{'s' if size > 1 else ''}; {length}")
    if job.plan.first_step:
        line(f"resuming from the checkpoint of step {job.plan.first_step}")
    data = digest_contents(job.contents) if job.collective.world.is_rank0 else {}
    warn_of_other_data(job, data, session)
    session.write_start(
        job.step.model,
        launcher=job.collective.world.launcher,
        samples=order.known_samples,
        global_batch_size=order.global_batch_size,
        steps_per_epoch=order.steps_per_epoch if order.has_known_length else None,
        total_steps=job.plan.known_total_steps,
        jit_compile=job.step.compiled is not None,
        data=data,
    )


def warn_of_other_data(job: Job, data: Mapping[str, str], session: RunSession) -> None:
    """Warn on rank 0 if a run resumes with other samples."""
    if session.directory is None or not job.plan.first_step:
        return
    path = session.directory.path
    starts = find_events(path, "start")
    if others := find_other_contents(starts[-1].get("data") if starts else None, data):
        session.warn(
            f"{', '.join(others)}: not what this run has used up to step {job.plan.first_step}, or rounded "
            "otherwise; it continues with what is there now. To train a new run on other data from these weights: "
            f"--init_from {path} with another --out."
        )


def run_steps(job: Job, session: RunSession, actions: Sequence[Action]) -> tuple[int, Ending]:
    """Train all steps, with the actions that are due.

    On a GPU the host reads a single step k while the device computes step k+1. On cores, or if step k determines the
    samples of step k+1, the host reads it at once.
    """
    guard, calls, batches = NonfiniteGuard(job, session), Calls(job, actions), job.batches
    steps_ahead = batches.max_steps_ahead if tf.config.get_visible_devices("GPU") else 0
    in_flight: collections.deque[Trained] = collections.deque()
    step = job.plan.first_step
    activity.set_phase(Phase.DATA, step + 1, takes_long=True)
    activity.set_step_times(0.0, 0.0)  # an earlier run of this process may have left others
    batches.begin()
    ending = catch_up(job, session, actions)
    singles = job.times.waiting_for(batches)

    def settle_all_but(num_steps: int) -> None:
        nonlocal ending
        while len(in_flight) > (0 if ending else num_steps):
            ending = settle(job, session, actions, guard, in_flight.popleft(), ending) or ending

    while ending is None and not batches.is_last(step):
        num_steps = calls.num_steps_after(step)
        if num_steps == 1:
            in_flight.append(train_step(job, session, step + 1, next(singles)))
            step, is_last = step + 1, in_flight[-1].is_last
            pauses = is_last or any(action.needs_pause and action.is_due(step, is_last=False) for action in actions)
            settle_all_but(0 if pauses else steps_ahead)
        else:
            settle_all_but(0)
            if ending is None:
                in_flight.append(train_many_steps(job, session, step, num_steps))
                step = in_flight[-1].step
                settle_all_but(0)
        activity.set_phase(Phase.DATA, step + 1)
    return step, ending or Ending.COMPLETED


class Trained(NamedTuple):
    step: int
    batch: Batch
    returned: Any
    is_last: bool


def train_step(job: Job, session: RunSession, step: int, batch: Batch) -> Trained:
    batches, first_step = job.batches, job.plan.first_step
    is_prepared = step > first_step + 1 and job.step.is_traced_for(batch)
    activity.set_phase(Phase.STEP, step, takes_long=not is_prepared)
    for labels in job.labels_to_check if step <= first_step + CHECKED_STEPS else ():
        labels.check(batch.y, batch.indices, of="training")
    with job.times.computing(), tf.profiler.experimental.Trace("train", step_num=step, _r=1):
        is_stop_wanted, next_count = session.requests.is_pending, batches.next_local_count
        learning_rate = job.plan.learning_rate_of(step)
        returned = job.step(batch, learning_rate, is_stop_wanted=is_stop_wanted, next_count=next_count)
    batches.note(lambda: float(job.step.read(returned).next_samples))
    return Trained(step, batch, returned, batches.is_last(step))


def train_many_steps(job: Job, session: RunSession, step: int, num_steps: int) -> Trained:
    """Train up to ``num_steps`` after ``step`` in one call; return the last, which alone may be non-finite."""
    batches, many = job.batches, job.many_steps
    is_first = not many.is_traced
    if is_first:
        activity.set_phase(Phase.COMPILE, step + 1, takes_long=True)
        many.trace()
    many.begin(step)
    activity.set_phase(Phase.DATA, step + 1, takes_long=is_first)
    learning_rates = [job.plan.learning_rate_of(step + number) for number in range(1, num_steps + 1)]
    with job.times.computing(), activity.phase_from(many.find_phase):
        try:
            rows, input_sec, batch = many(step, learning_rates, is_stop_wanted=session.requests.is_pending)
        except tf.errors.OpError as error:
            phase, failed = many.find_phase()
            if phase is Phase.DATA:
                raise batches.explain(error, failed - 1) from error
            raise
    job.times.note_input(input_sec)
    batches.skip(len(rows))
    job.times.note_communication(float(job.step.read(rows[:-1].T).communication_sec.sum()))
    if len(rows) > 1:
        session.progress.skipped_in_a_row = 0
    last = step + len(rows)
    return Trained(last, batch, rows[-1], batches.is_last(last))


def catch_up(job: Job, session: RunSession, actions: Sequence[Action]) -> Ending | None:
    """Run the evaluation that an earlier process did not finish, or stop early by one after which it was killed."""
    step = job.plan.first_step
    if not step or not job.is_evaluation_due(step, is_last=job.batches.is_last(step)):
        return None
    if session.progress.evaluated_step == step:
        return Ending.EARLY if session.progress.gives_up_after(job.config.stop_after) else None
    endings = [action.act(step) for action in actions if isinstance(action, CheckReplicas | Evaluate | Save)]
    activity.set_phase(Phase.DATA, step + 1, takes_long=True)
    return next((ending for ending in endings if ending), None)


def settle(
    job: Job,
    session: RunSession,
    actions: Sequence[Action],
    guard: NonfiniteGuard,
    trained: Trained,
    last_ending: Ending | None,
) -> Ending | None:
    """Read a step's result, and run due actions."""
    step, batch, returned, is_last = trained
    report = job.step.read(returned)
    guard.check(step, batch, report)
    job.times.note_communication(float(report.communication_sec))
    if not job.step.local_gradients.needs_every_rank:  # else it waits for others within the model as well
        activity.set_step_times(*job.times.with_and_without_waits)
    if session.console.is_terminal:
        session.console.loss(report.loss)
    is_stopped = bool(report.stop_votes) and not is_last
    ending = Ending.PREEMPTED if is_stopped else last_ending
    due = [action for action in actions if action.is_due(step, is_last=is_last)]
    due = [action for action in due if not (ending and action.needs_weights)]
    for action in due:
        ending = action.act(step, batch, report) or ending
    return ending


def finish(job: Job, session: RunSession, step: int, ending: Ending) -> None:
    """Save the last step; return only after all ranks know. Raises the same on all ranks."""
    session.progress.finished = None if ending is Ending.PREEMPTED else ending.value
    path = session.finish(step, job.step.named_variables, gather_state(job, session, step), job.times.totals())
    if ending is Ending.PREEMPTED:
        total_steps = job.plan.known_total_steps
        session.leave(f"step {step}" + (f" of {total_steps}" if total_steps else ""), path)
