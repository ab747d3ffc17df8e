"""``--profile START:STOP``: what rank 0 computes, and what Horovod does, during some steps, for the tools that show it.

TensorFlow's profile is rank 0's; Horovod's timeline shows for each tensor how long the ranks waited until all had it,
and how long the sum took. Both cost time: steps with a profile are slower than others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tensorflow as tf

from ringtrain.data.pipeline import Batch
from ringtrain.run.directory import RunDirectory, RunDirectoryError
from ringtrain.runtime import activity
from ringtrain.runtime.activity import Phase
from ringtrain.step.report import StepReport
from ringtrain.training.actions import Log
from ringtrain.training.job import Job

DIRECTORY = "profile"


class Profile:
    """An action of every rank: begins before the first step of the range, and ends after the last."""

    needs_weights = True  # no step may be under way when it begins, or all its work would not be within it

    def __init__(
        self,
        *,
        job: Job,
        run: RunDirectory | None,
        print_line: Callable[[str], None],
        log: Log | None,
    ) -> None:
        """``run`` is rank 0's; ``print_line`` shows a line to the user, ``log`` leaves out the time that this takes."""
        self._job, self._collective, self._run, self._print_line = job, job.collective, run, print_line
        self._first, self._last = map(int, job.config.profile.split(":")) if job.config.profile else (-1, -1)
        self._log = log
        self._is_under_way = False

    def is_due(self, step: int, *, is_last: bool) -> bool:
        if is_last:
            return self._is_under_way
        return step == self._last or step == self._first - 1

    def act(self, step: int, batch: Batch | None = None, report: StepReport | None = None) -> None:
        """Begin, or end, where ``step`` steps are done."""
        del batch, report
        if self._first <= step and self._is_under_way:
            self.close()
        elif self._first - 1 <= step < self._last:
            self._begin()

    def begin(self) -> None:
        """Before the first step: begin where the range does, or has; say where no step of it comes any more."""
        first, total = self._job.plan.first_step, self._job.plan.total_steps
        if self._first > total:
            self._print_line(
                f"warning: --profile {self._job.config.profile}: the run ends with step {total}; there is none"
            )
        elif 0 <= self._last <= first:
            self._print_line(
                f"warning: --profile {self._job.config.profile}: step {first} is done already; there is none"
            )
        else:
            self.act(first)

    def close(self) -> None:
        """Write what is there, where it is under way."""
        if not self._is_under_way:
            return
        self._is_under_way = False
        self._collective.stop_timeline()
        if self._run is not None:
            begin = time.perf_counter()
            activity.note(Phase.LOG, self._last, takes_long=True)
            with self._explaining():
                tf.profiler.experimental.stop()
            self._leave_out(begin)
            self._print_line(
                f"the profile of steps {self._first} to {self._last} is in {self._directory}: see it by "
                f"`tensorboard --logdir {self._directory}`, and Horovod's timeline by chrome://tracing"
            )

    def _begin(self) -> None:
        self._is_under_way = True
        timeline = ""
        if self._run is not None:
            begin = time.perf_counter()
            with self._explaining():
                self._directory.mkdir(exist_ok=True)
                tf.profiler.experimental.start(str(self._directory))
            timeline = str(self._directory / f"horovod-steps-{self._first}-{self._last}.json")
            self._leave_out(begin)
        self._collective.start_timeline(timeline)

    def _leave_out(self, begin: float) -> None:
        """Let the log not count the time since ``begin`` as that of steps."""
        if self._log is not None:
            self._log.leave_out(time.perf_counter() - begin)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Say of what cannot be written where it is."""
        try:
            yield
        except (tf.errors.OpError, OSError) as error:
            raise RunDirectoryError(self._directory, str(error)) from None

    @property
    def _directory(self) -> Path:
        assert self._run is not None
        return self._run.path / DIRECTORY
