"""What happens every n steps: the log, and evaluation. When each is due depends on the step alone, never on a rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ringtrain.console import Console
from ringtrain.data.order import SampleOrder
from ringtrain.data.pipeline import Batch
from ringtrain.evaluation import EvalReport
from ringtrain.run_directory import RunDirectory
from ringtrain.step import StepReport


class Action(Protocol):
    """Something to do after some steps, on every rank."""

    needs_weights: bool
    """whether the weights must be those after the step, so that no later step may be under way"""

    def is_due(self, step: int) -> bool:
        """Whether to act when ``step`` steps are done: the same answer on every rank."""

    def act(self, step: int, batch: Batch, report: StepReport) -> None:
        """Act when ``step`` steps are done; ``batch`` and ``report`` are those of the last of them."""


class Log:
    """The line of a step, on rank 0's console and in metrics.jsonl."""

    needs_weights = False

    def __init__(
        self, *, console: Console, run: RunDirectory, order: SampleOrder, every: int, first_step: int, last_step: int
    ) -> None:
        self._console, self._run, self._order = console, run, order
        self._every, self._last_step = every, last_step
        self._since_step, self._since = first_step, time.perf_counter()

    def is_due(self, step: int) -> bool:
        return step % self._every == 0 or step == self._last_step

    def act(self, step: int, batch: Batch, report: StepReport) -> None:
        del batch
        now = time.perf_counter()
        sec_per_step = (now - self._since) / (step - self._since_step)
        samples = self._order.samples_before(step) - self._order.samples_before(self._since_step)
        examples_per_sec = samples / (now - self._since)
        self._since_step, self._since = step, now
        text = (
            f"step {step}, loss = {report.loss:.4g} ({examples_per_sec:.1f} examples/sec; {sec_per_step:.3f} sec/batch)"
        )
        if self._console.is_terminal:
            self._console.progress(step, text)
        else:
            self._console.line(text)
        self._run.write_event(
            "train",
            step=step,
            epoch=epoch_after(self._order, step),
            samples_seen=self._order.samples_before(step),
            loss=report.loss,
            data_loss=report.data_loss,
            lr=report.learning_rate,
            gradient_norm=report.gradient_norm,
            examples_per_sec=round(examples_per_sec, 1),
            sec_per_step=round(sec_per_step, 6),
            **report.metrics,
        )

    def leave_out(self, seconds: float) -> None:
        """Do not count this time, in which no step was trained."""
        self._since += seconds


class Evaluate:
    """Evaluation by all ranks together."""

    needs_weights = True

    def __init__(
        self,
        *,
        evaluate: Callable[[], EvalReport],
        is_due: Callable[[int], bool],
        console: Console,
        run: RunDirectory | None,
        order: SampleOrder,
        log: Log | None,
    ) -> None:
        """``run`` and ``log`` are rank 0's; ``is_due`` must answer alike on every rank."""
        self._evaluate, self.is_due, self._order = evaluate, is_due, order
        self._console, self._run, self._log = console, run, log
        self.last: EvalReport | None = None

    def act(self, step: int, batch: Batch, report: StepReport) -> None:
        del batch, report
        start = time.perf_counter()
        self.last = result = self._evaluate()
        epoch = epoch_after(self._order, step)
        metrics = "".join(f", {name} = {value:.4f}" for name, value in result.metrics.items())
        self._console.line(
            f"epoch {epoch}, step {step}: eval loss = {result.loss:.4g}{metrics} ({result.samples} samples)"
        )
        if self._run is not None:
            self._run.write_event(
                "eval",
                step=step,
                epoch=epoch,
                samples=result.samples,
                loss=result.loss,
                data_loss=result.data_loss,
                **result.metrics,
            )
        if self._log is not None:
            self._log.leave_out(time.perf_counter() - start)


def epoch_after(order: SampleOrder, step: int) -> float:
    """The epochs done when ``step`` steps are done, such as 2.5; whole numbers as integers."""
    epochs = order.samples_before(step) / order.num_samples
    return int(epochs) if epochs == int(epochs) else round(epochs, 4)
