"""Actions every n steps: log, check, evaluate, save. They depend on the step, never on the rank."""

from __future__ import annotations

import abc
import base64
import enum
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object, raise_on_all_ranks
from ringtrain.collectives.context import alone
from ringtrain.data.order import SampleOrder
from ringtrain.data.pipeline import Batch
from ringtrain.errors import ReplicasDifferError
from ringtrain.files.bounded import make_directory
from ringtrain.guard.replicas import ReplicaGuard, require_finite_values
from ringtrain.messages.defects import describe_defect
from ringtrain.messages.rules import list_first
from ringtrain.run.directory import RunDirectoryError
from ringtrain.runtime.activity import Phase, set_phase
from ringtrain.step.assignments import keeping_values
from ringtrain.step.report import StepReport, shortest
from ringtrain.step.sharding import ShardedOptimizer
from ringtrain.training.evaluation import EvalReport
from ringtrain.training.job import Job
from ringtrain.training.plan import place_of_data
from ringtrain.training.row_state import gather_row_state
from ringtrain.training.session import MAX_IMAGES, RunSession, explaining

PROFILE_DIRECTORY = "profile"


class Ending(enum.Enum):
    COMPLETED = "completed"
    EARLY = "stopped early"
    PREEMPTED = "preempted"


class Action(abc.ABC):
    needs_weights = True  # no later step may be in flight

    @property
    def needs_pause(self) -> bool:
        """True if no later step may be in flight."""
        return self.needs_weights

    def __init__(self, job: Job, session: RunSession) -> None:
        self._job, self._session = job, session

    @abc.abstractmethod
    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Return the same on all ranks."""

    @abc.abstractmethod
    def act(self, step: int, batch: Batch, report: StepReport, /) -> Ending | None:
        """``batch`` and ``report`` are of the last step; the result is equal on all ranks."""


class Log(Action):
    needs_weights = False

    def __init__(self, job: Job, session: RunSession) -> None:
        super().__init__(job, session)
        self._job.times.lap()
        self._since_step = self._job.plan.first_step
        self._since_samples = job.batches.samples_before(self._since_step)

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return step % self._job.config.log_every == 0 or is_last

    @property
    def needs_pause(self) -> bool:
        return bool(self._job.step.stateful_metrics.names)  # a later step changes their states

    def act(self, step: int, batch: Batch, report: StepReport) -> None:
        set_phase(Phase.LOG, step)
        stateful_values = self._job.step.stateful_metrics.merge_and_reset(self._job.collective, name="log/metrics")
        if not self._job.collective.world.is_rank0:
            return
        metric_values = report.metrics | stateful_values
        num_steps, seconds = step - self._since_step, self._job.times.lap()
        samples_seen = self._job.batches.samples_before(step)
        sec_per_step, examples_per_sec = seconds / num_steps, (samples_seen - self._since_samples) / seconds
        self._since_step, self._since_samples = step, samples_seen
        console = self._session.console
        if console.is_terminal:
            metrics = [f"{name} {value:.4f}" for name, value in metric_values.items()]
            console.progress(step, [f"{examples_per_sec:,.0f} examples/s", *metrics])
        else:
            speed = f"{examples_per_sec:.1f} examples/sec; {sec_per_step:.3f} sec/batch"
            console.line(f"step {step}, loss = {report.loss:.4g} ({speed})")
        values = {
            "loss": report.loss,
            "data_loss": report.data_loss,
            "lr": shortest(report.learning_rate),
            "gradient_norm": shortest(report.gradient_norm),
            "examples_per_sec": round(examples_per_sec, 1),
            "sec_per_step": round(sec_per_step, 6),
            **metric_values,
        }
        epoch, times = epoch_after(self._job.plan.order, step), self._job.times.take(num_steps, sec_per_step)
        self._session.log("train", values, step=step, epoch=epoch, samples_seen=samples_seen, **times)


class Evaluate(Action):
    last: EvalReport | None = None

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return self._job.is_evaluation_due(step, is_last=is_last)

    def act(self, step: int, *_: object) -> Ending | None:
        config, progress = self._job.config, self._session.progress
        with self._job.times.leaving_out():
            start = time.perf_counter()
            result = self._job.evaluate(lambda: self._session.requests.is_pending)
            if result is None:
                return Ending.PREEMPTED
            self.last = result
            progress.note_evaluation(step, result.values[config.best_metric], config.best_direction)
            if self._job.collective.world.is_rank0:
                self._record(step, result, seconds=time.perf_counter() - start)
        return Ending.EARLY if progress.gives_up_after(config.stop_after) else None

    def _record(self, step: int, result: EvalReport, *, seconds: float) -> None:
        set_phase(Phase.LOG, step)
        epoch, console = epoch_after(self._job.plan.order, step), self._session.console
        metrics = "".join(f", {name} = {value:.4f}" for name, value in result.metrics.items())
        where = f"epoch {round(epoch, 2):g}, step {step}" if self._job.plan.order.has_known_length else f"step {step}"
        console.line(f"{where}: eval loss = {result.loss:.4g}{metrics} ({result.samples} samples)")
        took = round(seconds, 3)
        self._session.log("eval", result.values, step=step, epoch=epoch, samples=result.samples, seconds=took)
        try:
            self._show(step)
        except RunDirectoryError:
            raise
        except Exception as error:  # user code; training must not fail for a picture
            self._session.warn(f"{type(self._job.workload).__name__}.summaries is not shown: {describe_defect(error)}")

    def _show(self, step: int) -> None:
        """Show the first samples, on rank 0, without a collective."""
        if self._job.evaluation is not None:
            source = self._job.evaluation.source
            shown = tf.range(min(MAX_IMAGES, source.num_samples), dtype=tf.int64)
            x, y = source.gather(shown)
            with alone(), keeping_values(self._job.step.row_state):
                self._session.show(self._job.workload.summaries(self._job.step.model, x, y), step=step)


class Save(Action):
    def is_due(self, step: int, *, is_last: bool) -> bool:
        return self._job.may_save(step, is_last=is_last)

    def act(self, step: int, *_: object) -> None:
        as_step, as_best = self._job.is_checkpoint_due(step), self._session.progress.best_step == step
        if not (as_step or as_best):
            return
        gathered = gather_state(self._job, self._session, step)
        self._session.save(step, self._job.step.named_variables, gathered, as_step=as_step, as_best=as_best)


def gather_state(job: Job, session: RunSession, step: int) -> dict[str, np.ndarray]:
    """Check all values; record each rank's pipeline; return whole sharded slots, on rank 0. Collective."""
    row_state = job.step.named_row_state
    checked = job.step.named_variables | job.step.named_pieces | row_state
    require_finite_values(checked, job.collective, step=step)
    session.progress.samples_seen = job.batches.samples_before(step)
    place = job.batches.state_before(step)
    if place is not None:  # on all ranks
        mine = [place[0], base64.b64encode(place[1]).decode(), place_of_data(job.config)]
        places = all_gather_object(job.collective, mine, name="places")
        # create_batches takes the states of all ranks, or rank 0's if the stream is shared.
        session.progress.places = [(at, state, where) for at, state, where in places if state]
    return job.step.gather_shared_out() | gather_row_state(job.collective, row_state)


class CheckReplicas(Action):
    """Also before each save: no divergent state is saved."""

    def __init__(self, job: Job, session: RunSession) -> None:
        super().__init__(job, session)
        self._guard = ReplicaGuard(self._job.step.named_variables, self._job.collective)

    def is_due(self, step: int, *, is_last: bool) -> bool:
        every = self._job.config.check_replicas_every
        return every > 0 and (step % every == 0 or self._job.may_save(step, is_last=is_last))

    def act(self, step: int, *_: object) -> None:
        if self._job.config.check_replicas_every:
            set_phase(Phase.CHECK, step)
            self._guard.check(step)
            if self._job.step.sharded is not None:
                require_same_pieces(self._job.step.sharded, self._job.collective, step)


def require_same_pieces(sharded: ShardedOptimizer, collective: Collective, step: int) -> None:
    """Collective."""

    def look() -> None:
        if names := sharded.find_changed():
            raise ReplicasDifferError(
                f"at step {step} this rank's piece of {list_first(names)}, which it updates for all ranks "
                "(--shard_optimizer), is not what the ranks have. Nothing is saved of this step. Either a device or "
                "memory is faulty, or something other than the step changes weights. The same command resumes from "
                "the last checkpoint."
            )

    raise_on_all_ranks(collective, look, name="pieces")


class Profile(Action):
    """``--profile START:STOP``: TensorFlow's profile of rank 0, and a timeline of all ranks' sums.

    No step may be in flight at the start: its work would be cut off.
    """

    def __init__(self, job: Job, session: RunSession) -> None:
        super().__init__(job, session)
        profile = self._job.config.profile
        self._first, self._last = map(int, profile.split(":")) if profile else (-1, -1)
        self._name = f"steps-{self._first}-{self._last}"
        self._directory = session.directory.path / PROFILE_DIRECTORY if session.directory is not None else None
        self._is_under_way = False

    def is_due(self, step: int, *, is_last: bool) -> bool:
        if is_last:
            return self._is_under_way
        return step == self._last or step == self._first - 1

    def act(self, step: int, *_: object) -> None:
        if self._first <= step and self._is_under_way:
            self.close()
        elif self._first - 1 <= step < self._last:
            self._begin()

    def begin(self) -> None:
        first, total = self._job.plan.first_step, self._job.plan.total_steps
        if self._first > total:
            why = f"the run ends with step {total}"
        elif 0 <= self._last <= first:
            why = f"step {first} is done already"
        else:
            self.act(first)
            return
        self._session.console.line(f"warning: --profile {self._job.config.profile}: {why}; no profile is written")

    def close(self, *, on_all: bool = True) -> None:
        """The timeline is written only if all ranks do so (``on_all``)."""
        if not self._is_under_way:
            return
        self._is_under_way = False
        try:
            if on_all:
                with self._job.times.leaving_out(), explaining(self._directory or Path()):
                    self._job.collective.stop_timeline()
        finally:
            self._stop_profiler()

    def _stop_profiler(self) -> None:
        if self._directory is not None:
            set_phase(Phase.LOG, self._last, takes_long=True)
            with self._job.times.leaving_out(), explaining(self._directory):
                # TensorFlow would create it again if it was moved away.
                is_there = self._directory.is_dir()
                tf.profiler.experimental.stop(save=is_there)
            if not is_there:
                return
            timelines = sorted(path.name for path in self._directory.glob(f"*-{self._name}.json"))
            self._session.console.line(
                f"the profile of steps {self._first} to {self._last} is in {self._directory}: see it by "
                f"`tensorboard --logdir {self._directory}`"
                f"{', and the sums of all ranks by chrome://tracing: ' + ', '.join(timelines) if timelines else ''}"
            )

    def _begin(self) -> None:
        self._is_under_way = True
        if self._directory is not None:
            with self._job.times.leaving_out(), explaining(self._directory):
                for below in (".", "plugins", "plugins/profile"):  # TensorFlow would follow links
                    make_directory(self._directory / below)
                for file in self._directory.glob(f"*-{self._name}.json"):
                    file.unlink()  # an earlier start's timelines, or links
                tf.profiler.experimental.start(str(self._directory))
        self._job.collective.start_timeline(str(self._directory or ""), self._name)


def epoch_after(order: SampleOrder, step: int) -> float:
    epochs = order.samples_before(step) / order.num_samples
    return int(epochs) if epochs == int(epochs) else round(epochs, 4)
