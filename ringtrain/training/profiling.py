"""``--profile START:STOP``: what rank 0 computes, and what Horovod does, during some steps, for the tools that show it.

TensorFlow's profile is rank 0's; Horovod's timeline shows for each tensor how long the ranks waited until all had it,
and how long the sum took. Both cost time: steps with a profile are slower than others.
"""

from __future__ import annotations

import tensorflow as tf

from ringtrain.runtime import activity
from ringtrain.runtime.activity import Phase
from ringtrain.training.actions import Action, Training
from ringtrain.training.summaries import explaining

DIRECTORY = "profile"


class Profile(Action):
    """An action of every rank: begins before the first step of the range, and ends after the last."""

    # It needs the weights: no step may be under way when it begins, or all its work would not be within it.

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._print_line = training.console.line
        profile = self._job.config.profile
        self._first, self._last = map(int, profile.split(":")) if profile else (-1, -1)
        self._directory = training.records.run.path / DIRECTORY if training.records is not None else None
        self._is_under_way = False

    def is_due(self, step: int, *, is_last: bool) -> bool:
        if is_last:
            return self._is_under_way
        return step == self._last or step == self._first - 1

    def act(self, step: int, *_: object) -> None:
        """Begin, or end, where ``step`` steps are done."""
        if self._first <= step and self._is_under_way:
            self.close()
        elif self._first - 1 <= step < self._last:
            self._begin()

    def begin(self) -> None:
        """Before the first step: begin where the range does, or has; say where no step of it comes any more."""
        first, total = self._job.plan.first_step, self._job.plan.total_steps
        if self._first > total:
            why = f"the run ends with step {total}"
        elif 0 <= self._last <= first:
            why = f"step {first} is done already"
        else:
            self.act(first)
            return
        self._print_line(f"warning: --profile {self._job.config.profile}: {why}; there is none")

    def close(self) -> None:
        """Write what is there, where it is under way."""
        if not self._is_under_way:
            return
        self._is_under_way = False
        self._job.collective.stop_timeline()
        if self._directory is not None:
            activity.note(Phase.LOG, self._last, takes_long=True)
            with self._job.times.leaving_out(), explaining(self._directory):
                tf.profiler.experimental.stop()
            self._print_line(
                f"the profile of steps {self._first} to {self._last} is in {self._directory}: see it by "
                f"`tensorboard --logdir {self._directory}`, and Horovod's timeline by chrome://tracing"
            )

    def _begin(self) -> None:
        self._is_under_way = True
        timeline = ""
        if self._directory is not None:
            with self._job.times.leaving_out(), explaining(self._directory):
                self._directory.mkdir(exist_ok=True)
                tf.profiler.experimental.start(str(self._directory))
            timeline = str(self._directory / f"horovod-steps-{self._first}-{self._last}.json")
        self._job.collective.start_timeline(timeline)
