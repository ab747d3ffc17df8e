"""The training loop: ``train``, then its parts in the order of their calls."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object, run_on_rank0
from ringtrain.data.order import StreamingOrder
from ringtrain.data.pipeline import Batch
from ringtrain.errors import Cause, PreemptedError, RingtrainError
from ringtrain.guard.contents import digest_contents, find_other_contents
from ringtrain.guard.finite import require_finite_values
from ringtrain.guard.labels import CHECKED_STEPS
from ringtrain.guard.lost import explaining_lost_ranks
from ringtrain.guard.preflight import package_versions
from ringtrain.run.directory import find_events
from ringtrain.run.progress import Progress
from ringtrain.run.resume import OpenedRun, Start, describe_way_on
from ringtrain.runtime import activity
from ringtrain.runtime.activity import Phase
from ringtrain.runtime.stopping import StopRequests
from ringtrain.step.report import read_loss, read_value
from ringtrain.terminal.console import Console
from ringtrain.training.actions import (
    Action,
    CheckReplicas,
    Ending,
    Evaluate,
    Log,
    Profile,
    Records,
    Save,
    Training,
    note_places,
)
from ringtrain.training.ending import write_warning
from ringtrain.training.evaluation import EvalReport
from ringtrain.training.job import Job, create_job
from ringtrain.training.joining import Prepared
from ringtrain.training.nonfinite import NonfiniteGuard
from ringtrain.training.rank_records import describe_ranks, gather_usage
from ringtrain.training.saving import restore, take_snapshot, take_weights


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a training run."""

    ending: Ending
    evaluation: EvalReport | None  # the last of this process; None without evaluation
    best: float | None = None  # value of ``best_metric``; None without evaluation
    best_step: int | None = None


def train(
    prepared: Prepared,
    collective: Collective,
    *,
    start: Start,
    opened: OpenedRun | None,
    requests: StopRequests,
    console: Console,
) -> Result:
    """Train from the start of the run or its checkpoint. Collective; ``opened`` is None on ranks other than 0."""
    job = create_job(
        prepared.workload,
        prepared.config,
        collective,
        num_threads=prepared.plan.intra_op_threads,
        start=start,
        print_line=console.line,
    )
    progress = Progress(**start.progress)
    if job.batches.is_counted and not progress.samples_seen:  # as planned so far
        progress.samples_seen = job.plan.order.samples_before(job.plan.first_step)
    set_initial_values(job, opened, console)
    describe(job, console, opened)
    records = Records(job, opened, console) if opened is not None else None
    training = Training(
        job=job, progress=progress, console=console, requests=requests, path=Path(start.path), records=records
    )
    log = [Log(training, records)] if records is not None else []
    profile, check, evaluate = Profile(training), CheckReplicas(training), Evaluate(training)
    check.act(job.plan.first_step)
    leave_if_told_to(job, requests)
    requests.start_training(training.announce)
    console.start_progress(job.plan.total_steps, job.plan.first_step, training.find_last_saved_step)
    try:
        profile.begin()
        with explaining_lost_ranks():  # before cleanup changes this rank's phase
            # The check precedes everything that saves; the checkpoint is last, as it contains the others' results.
            step, ending = run_steps(training, [profile, *log, check, evaluate, Save(training)])
            profile.close()  # if the run ends within the profile
    except BaseException:
        requests.end_training()
        raise
    finally:
        with contextlib.suppress(RingtrainError):
            profile.close(on_all=False)  # a running profile means that this rank failed
        if records is not None:
            records.close()
        console.stop_progress()
    check.act(step)
    finish(training, step, ending)
    best_step = progress.best_step if progress.best is not None else None
    return Result(ending=ending, evaluation=evaluate.last, best=progress.best, best_step=best_step)


def set_initial_values(job: Job, opened: OpenedRun | None, console: Console) -> None:
    """Restore or initialize on rank 0, then broadcast."""

    checkpoint = opened.checkpoint if opened is not None else None

    def set_on_rank0() -> tuple[bool, list[str]]:
        if checkpoint is not None:
            restore(job, checkpoint)
            return True, []
        return False, take_weights(job, job.config.init_from) if job.config.init_from is not None else []

    activity.note(Phase.RESTORE, takes_long=True)
    is_restored, lines = run_on_rank0(job.collective, set_on_rank0, name="first_values")
    for line in lines:
        console.line(line)
    slots = checkpoint.variables if checkpoint is not None else {}
    job.step.share_values(job.collective, slots if is_restored else None)


def describe(job: Job, console: Console, opened: OpenedRun | None) -> None:
    order, size = job.plan.order, job.collective.world.size
    parameters = job.step.model.count_params()
    evaluated = f", {job.evaluation.num_samples:,} to evaluate on" if job.evaluation else ""
    samples = f"{order.num_samples:,} samples"
    if isinstance(order, StreamingOrder):
        samples = "every rank reads all samples, and takes its slice" if order.is_shared else "samples fed by each rank"
    console.line(f"{job.config.workload}: {parameters:,} parameters; {samples}{evaluated}")
    console.line(
        f"global batch {order.global_batch_size} over {size} rank{'s' if size > 1 else ''}; "
        f"{order.steps_per_epoch} steps an epoch, {job.plan.total_steps} in all"
    )
    if job.plan.first_step:
        console.line(f"resuming from the checkpoint of step {job.plan.first_step}")
    ranks = describe_ranks(job.collective)
    if opened is not None:
        data = digest_contents(job.contents)
        warn_of_other_data(job, data, opened, console)
        opened.directory.write_event(
            "start",
            workload=job.config.workload,
            size=size,
            samples=None if isinstance(order, StreamingOrder) else order.num_samples,  # unknown for a stream
            global_batch_size=order.global_batch_size,
            steps_per_epoch=order.steps_per_epoch,
            first_step=job.plan.first_step,
            total_steps=job.plan.total_steps,
            parameters=parameters,
            jit_compile=job.step.compiled is not None,
            node=job.collective.world.node,
            launcher=job.collective.world.launcher,
            ranks=ranks,
            versions=package_versions(),
            data=data,
        )


def warn_of_other_data(job: Job, data: Mapping[str, str], opened: OpenedRun, console: Console) -> None:
    """Warn if a run resumes with other samples."""
    starts = find_events(opened.directory.path, "start") if job.plan.first_step else []
    if others := find_other_contents(starts[-1].get("data") if starts else None, data):
        write_warning(
            opened.directory,
            console,
            f"{', '.join(others)}: not what this run has used up to step {job.plan.first_step}, or rounded "
            "otherwise; it continues with what is there now. To train a new run on other data from these weights: "
            f"--init_from {opened.directory.path} with another --out.",
        )


def leave_if_told_to(job: Job, requests: StopRequests) -> None:
    """Exit before the first step, on all ranks, if one was asked to."""
    who, cause = find_requests(job.collective, requests)
    if cause is not None:
        requests.clear_file()
        first_step = job.plan.first_step
        stands = f"the checkpoint of step {first_step} stands" if first_step else "there was nothing to save"
        raise PreemptedError(f"stopped by {who} before the first step; {stands}.", stopped_by=cause)


def find_requests(collective: Collective, requests: StopRequests) -> tuple[str, Cause | None]:
    """Return the stop requests of all ranks as text and cause (None: none). Collective.

    The user's file has priority: automatic restarts respect it.
    """
    node = collective.world.node
    said = all_gather_object(collective, [requests.reason, requests.cause, node], name="stop_requests")
    who = ", ".join(
        f"{reason} at rank {rank} on {node}" if cause == "signal" else reason
        for rank, (reason, cause, node) in enumerate(said)
        if reason
    )
    given = {cause for _, cause, _ in said}
    causes: tuple[Cause, ...] = ("file", "time", "signal")
    return who, next((cause for cause in causes if cause in given), None)


def run_steps(training: Training, actions: Sequence[Action]) -> tuple[int, Ending]:
    """Train all steps, with the actions that are due.

    On a GPU the host reads step k while the device computes step k+1, so that the device never waits. On cores a step
    is done when the call returns, so the host reads it at once; also if step k determines the number of samples of step
    k+1. Returns the number of steps and the reason for the end, equal on all ranks.
    """
    job, guard = training.job, NonfiniteGuard(training)
    batches, times = job.batches, job.times
    steps_ahead = 1 if tf.config.get_visible_devices("GPU") and not batches.is_counted else 0
    in_flight: collections.deque[Trained] = collections.deque()
    step = job.plan.first_step
    activity.note(Phase.DATA, step + 1, takes_long=True)
    batches.begin()
    ending = catch_up(training, actions)
    for step, batch in enumerate(times.waiting_for(batches if ending is None else ()), start=job.plan.first_step + 1):
        is_prepared = step > job.plan.first_step + 1 and job.step.is_traced_for(batch)
        activity.note(Phase.STEP, step, takes_long=not is_prepared)
        learning_rate = job.plan.learning_rate(job.plan.order.samples_before(step - 1))
        for labels in job.labels_to_check if step <= job.plan.first_step + CHECKED_STEPS else ():
            labels.check(batch.y, batch.indices, of="training")
        with times.computing(), tf.profiler.experimental.Trace("train", step_num=step, _r=1):
            is_stop_wanted, next_count = training.requests.is_pending, batches.next_local_count
            returned = job.step(batch, learning_rate, is_stop_wanted=is_stop_wanted, next_count=next_count)
        if batches.is_counted:
            batches.note(int(read_value(returned, "next_samples")))
        is_last = batches.is_last(step)
        in_flight.append(Trained(step, batch, returned, is_last))
        pauses = is_last or any(action.needs_weights and action.is_due(step, is_last=False) for action in actions)
        while len(in_flight) > (0 if pauses or ending else steps_ahead):
            ending = settle(training, actions, guard, in_flight.popleft(), ending) or ending
        if ending is not None:
            break
        activity.note(Phase.DATA, step + 1)
    return step, ending or Ending.COMPLETED


class Trained(NamedTuple):
    step: int
    batch: Batch
    returned: tf.Tensor
    is_last: bool


def catch_up(training: Training, actions: Sequence[Action]) -> Ending | None:
    """Run the evaluation that an earlier process did not finish."""
    job, step = training.job, training.job.plan.first_step
    is_last = job.batches.is_last(step)
    if not step or training.progress.evaluated_step == step or not job.is_evaluation_due(step, is_last=is_last):
        return None
    endings = [action.act(step) for action in actions if isinstance(action, CheckReplicas | Evaluate | Save)]
    activity.note(Phase.DATA, step + 1, takes_long=True)
    return next((ending for ending in endings if ending), None)


def settle(
    training: Training, actions: Sequence[Action], guard: NonfiniteGuard, trained: Trained, last_ending: Ending | None
) -> Ending | None:
    """Read a step's result, run due actions, and return the ending, if any."""
    job, (step, batch, returned, is_last) = training.job, trained
    guard.check(step, batch, returned)
    job.times.note_communication(read_value(returned, "communication_sec"))
    if training.console.is_terminal:
        training.console.loss(read_loss(returned))
    if job.batches.is_counted:
        training.progress.samples_seen += job.step.read(returned).samples
    is_stopped = bool(read_value(returned, "stop_votes")) and not is_last
    ending = Ending.PREEMPTED if is_stopped else last_ending
    due = [action for action in actions if action.is_due(step, is_last=is_last)]
    due = [action for action in due if not (ending and action.needs_weights)]
    if due:
        report = job.step.read(returned)
        for action in due:
            ending = action.act(step, batch, report) or ending
    return ending


def finish(training: Training, step: int, ending: Ending) -> None:
    """Save the last step; return only after all ranks know. Raises the same on all ranks."""
    job, requests, records = training.job, training.requests, training.records
    training.progress.finished = None if ending is Ending.PREEMPTED else ending.value
    require_finite_values(job.step.named_variables | job.step.named_pieces, job.collective, step=step)
    note_places(training, step)
    gathered = job.step.gather_shared_out()
    usage = gather_usage(job.collective, job.times.totals())

    def save_on_rank0() -> str:
        assert records is not None
        records.run.at_end["ranks"] = usage
        return records.writer.finish(
            take_snapshot(job.step.named_variables, step, training.progress, records.run_facts, gathered)
        )

    activity.note(Phase.SAVE, step, takes_long=True)
    path = run_on_rank0(job.collective, save_on_rank0, name="finish")
    if ending is Ending.PREEMPTED:
        who, cause = find_requests(job.collective, requests)
        requests.clear_file()
        raise PreemptedError(
            f"stopped by {who}: step {step} of {job.plan.total_steps} is saved in {path}. "
            f"{describe_way_on(job.config, Path(path).parent)}",
            stopped_by=cause or "signal",
        )
