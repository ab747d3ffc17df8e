"""What happens every n steps: log, check, evaluate, save. When each is due depends on the step, never on a rank."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import Protocol

import tensorflow as tf

from ringtrain.data.order import SampleOrder
from ringtrain.data.pipeline import Batch
from ringtrain.data.sources import is_fallible
from ringtrain.data.stepping import describe_bad
from ringtrain.guard.finite import require_finite_values
from ringtrain.guard.replicas import ReplicaGuard
from ringtrain.messages.defects import describe_defect
from ringtrain.run.checkpoint import Checkpoint
from ringtrain.run.directory import RunDirectory, RunDirectoryError
from ringtrain.run.progress import Progress
from ringtrain.runtime import activity
from ringtrain.runtime.activity import Phase
from ringtrain.runtime.stopping import StopRequests
from ringtrain.step.report import StepReport
from ringtrain.terminal.console import Console
from ringtrain.training.evaluation import EvalReport
from ringtrain.training.job import Job
from ringtrain.training.saving import CheckpointWriter
from ringtrain.training.summaries import MAX_IMAGES, EventFiles


class Ending(enum.Enum):
    """Why the training ends."""

    COMPLETED = "completed"
    EARLY = "stopped early"
    PREEMPTED = "preempted"


class Action(Protocol):
    """Something to do after some steps, on every rank."""

    needs_weights: bool
    """whether the weights must be those after the step, so that no later step may be under way"""

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether to act when ``step`` steps are done, and no more come if ``is_last``: alike on every rank."""

    def act(self, step: int, batch: Batch, report: StepReport) -> Ending | None:
        """Act when ``step`` steps are done; ``batch`` and ``report`` are those of the last of them.

        Returns:
            Whether the training is to end now, and why: the same answer on every rank.
        """


class Records:
    """Where rank 0 writes what happens: the run directory's events, TensorBoard's, the console."""

    def __init__(self, run: RunDirectory, console: Console, *, first_step: int) -> None:
        self.run, self.console = run, console
        self.events = EventFiles(run.tensorboard, first_step=first_step)

    def close(self) -> None:
        """Bring TensorBoard's events to their files."""
        self.events.close()


class Log:
    """The line of a step, on rank 0's console, in metrics.jsonl and in TensorBoard."""

    needs_weights = False

    def __init__(self, *, records: Records, job: Job, progress: Progress) -> None:
        self._records, self._job, self._progress = records, job, progress
        self._since_step, self._since = job.plan.first_step, time.perf_counter()
        self._since_samples = self._samples_seen(job.plan.first_step)

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return step % self._job.config.log_every == 0 or is_last

    def act(self, step: int, batch: Batch, report: StepReport) -> None:
        del batch
        activity.note(Phase.LOG, step)
        now = time.perf_counter()
        num_steps = step - self._since_step
        sec_per_step = (now - self._since) / num_steps
        samples_seen = self._samples_seen(step)
        examples_per_sec = (samples_seen - self._since_samples) / (now - self._since)
        self._since_step, self._since, self._since_samples = step, now, samples_seen
        self._show(step, report, examples_per_sec, sec_per_step)
        values = {
            "loss": report.loss,
            "data_loss": report.data_loss,
            "lr": report.learning_rate,
            "gradient_norm": report.gradient_norm,
            "examples_per_sec": round(examples_per_sec, 1),
            "sec_per_step": round(sec_per_step, 6),
            **report.metrics,
        }
        self._records.run.write_event(
            "train",
            step=step,
            epoch=epoch_after(self._job.plan.order, step),
            samples_seen=samples_seen,
            **values,
            **self._job.times.take(num_steps, sec_per_step),
        )
        self._records.events.scalars("train", values, step=step)

    def _show(self, step: int, report: StepReport, examples_per_sec: float, sec_per_step: float) -> None:
        console = self._records.console
        if console.is_terminal:
            metrics = [f"{name} {value:.4f}" for name, value in report.metrics.items()]
            console.progress(step, [f"loss {report.loss:.4g}", f"{examples_per_sec:,.0f} examples/s", *metrics])
            return
        speed = f"{examples_per_sec:.1f} examples/sec; {sec_per_step:.3f} sec/batch"
        console.line(f"step {step}, loss = {report.loss:.4g} ({speed})")

    def _samples_seen(self, step: int) -> int:
        job = self._job
        return self._progress.samples_seen if job.batches.is_counted else job.plan.order.samples_before(step)

    def leave_out(self, seconds: float) -> None:
        """Do not count this time, in which no step was trained."""
        self._since += seconds


class Evaluate:
    """Evaluation by all ranks together."""

    needs_weights = True

    def __init__(
        self, *, job: Job, progress: Progress, requests: StopRequests | None, records: Records | None, log: Log | None
    ) -> None:
        """``records`` and ``log`` are rank 0's; ``progress`` must be alike on every rank."""
        self._job, self._progress, self._requests = job, progress, requests
        self._records, self._log = records, log
        self.last: EvalReport | None = None

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return self._job.is_evaluation_due(step, is_last=is_last)

    def act(self, step: int, batch: Batch | None = None, report: StepReport | None = None) -> Ending | None:
        del batch, report
        start = time.perf_counter()
        requests = self._requests
        result = self._job.evaluate(lambda: requests is not None and requests.is_pending)
        if result is None:
            return Ending.PREEMPTED  # the evaluation is made when the run goes on
        self.last = result
        config = self._job.config
        self._progress.note_evaluation(step, result.value(config.best_metric), config.best_direction)
        if self._records is not None:
            self._record(step, result, self._records, seconds=time.perf_counter() - start)
        if self._log is not None:
            self._log.leave_out(time.perf_counter() - start)
        gives_up = 0 < config.stop_after <= self._progress.evaluations_without_best
        return Ending.EARLY if gives_up else None

    def _record(self, step: int, result: EvalReport, records: Records, *, seconds: float) -> None:
        activity.note(Phase.LOG, step)
        epoch = epoch_after(self._job.plan.order, step)
        metrics = "".join(f", {name} = {value:.4f}" for name, value in result.metrics.items())
        if result.left_out:
            records.console.line(f"warning: evaluation: left out {describe_bad(list(result.left_out))}")
        records.console.line(
            f"epoch {round(epoch, 2):g}, step {step}: eval loss = {result.loss:.4g}{metrics} ({result.samples} samples)"
        )
        values = {"loss": result.loss, "data_loss": result.data_loss, **result.metrics}
        took = {"seconds": round(seconds, 3)}
        records.run.write_event("eval", step=step, epoch=epoch, samples=result.samples, **(took | values))
        records.events.scalars("eval", values, step=step)
        try:
            self._show(step, records)
        except RunDirectoryError:
            raise
        except Exception as error:  # of the user's code; what was trained is not to be lost for a picture
            message = f"{type(self._job.workload).__name__}.summaries is not shown: {describe_defect(error)}"
            records.console.line(f"warning: {message}")
            records.run.write_event("warning", step=step, message=message)

    def _show(self, step: int, records: Records) -> None:
        """What the workload shows of the first samples: on this rank alone, and so without any collective."""
        source = self._job.evaluation
        if source is not None:
            shown = tf.range(min(MAX_IMAGES, source.num_samples), dtype=tf.int64)
            x, y = source.gather_good(shown)[1:] if is_fallible(source) else source.gather(shown)
            records.events.show(self._job.workload.summaries(self._job.step.model, x, y), step=step)


class Save:
    """Checkpoints: every n steps, and after each evaluation that is the best so far."""

    needs_weights = True

    def __init__(
        self,
        *,
        job: Job,
        progress: Progress,
        snapshot: Callable[[int], Checkpoint],
        writer: CheckpointWriter | None,
        records: Records | None,
    ) -> None:
        """``writer`` and ``records`` are rank 0's."""
        self._job, self._progress, self.snapshot = job, progress, snapshot
        self._writer, self._records = writer, records

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return self._is_periodic(step) or self._job.is_evaluation_due(step, is_last=is_last)

    def act(self, step: int, batch: Batch | None = None, report: StepReport | None = None) -> None:
        del batch, report
        as_step, as_best = self._is_periodic(step), self._progress.best_step == step
        if as_step or as_best:
            require_finite_values(self._job.step.named_variables, self._job.collective, step=step)
        if self._writer is not None and self._records is not None and (as_step or as_best):
            activity.note(Phase.SAVE, step, takes_long=True)
            self._records.events.flush()
            self._writer.save(self.snapshot(step), as_step=as_step, as_best=as_best)

    def _is_periodic(self, step: int) -> bool:
        """The last step is saved when all is done."""
        every = self._job.config.checkpoint_every
        return every > 0 and step % every == 0 and step != self._job.plan.total_steps


class CheckReplicas:
    """See that all ranks hold the same, every n steps and before whatever is saved, so that no drift is ever saved."""

    needs_weights = True

    def __init__(self, *, job: Job, save: Save) -> None:
        self._job, self._save = job, save
        self._guard = ReplicaGuard(job.step.named_variables, job.collective)

    def is_due(self, step: int, *, is_last: bool) -> bool:
        every = self._job.config.check_replicas_every
        return every > 0 and (step % every == 0 or self._save.is_due(step, is_last=is_last))

    def act(self, step: int, batch: Batch | None = None, report: StepReport | None = None) -> None:
        """Check unless no checks are wanted; once for a step."""
        del batch, report
        if self._job.config.check_replicas_every:
            activity.note(Phase.CHECK, step)
            self._guard.check(step)


def epoch_after(order: SampleOrder, step: int) -> float:
    """The epochs done when ``step`` steps are done, such as 2.5; whole numbers as integers."""
    epochs = order.samples_before(step) / order.num_samples
    return int(epochs) if epochs == int(epochs) else round(epochs, 4)
