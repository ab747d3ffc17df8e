"""Lengths of the calls that train several steps; the same on all ranks."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence

import tensorflow as tf

from ringtrain.collectives import all_gather_object
from ringtrain.guard.labels import CHECKED_STEPS
from ringtrain.messages.log import LOG
from ringtrain.step.many_steps import why_single_steps
from ringtrain.training.actions import Action
from ringtrain.training.job import Job

CALL_SECONDS = 0.1  # a request to stop waits for the end of a call
MAX_STEPS_PER_CALL = 32  # more saves nothing
TIMED_STEPS = 10
# A step in a call of many saves this share of it, and at most so many seconds (two ranks on two cores).
SAVED_SHARE, SAVED_SECONDS = 0.2, 0.002


class Calls:
    """Calls end with the next step after which an action is due; ``--steps_per_call auto`` measures the first steps."""

    def __init__(self, job: Job, actions: Sequence[Action]) -> None:
        """Collective."""
        self._job, self._actions = job, actions
        self._first_of_many = job.plan.first_step + (CHECKED_STEPS if job.labels_to_check else 1)
        self._max_steps = self._choose_maximum()
        self._moments: list[float] = []

    def _choose_maximum(self) -> int:
        """Return 0 to measure first."""
        wanted = self._job.config.steps_per_call
        if wanted == "1":
            return 1
        reasons = all_gather_object(self._job.collective, self._why_single(), name="steps_per_call")
        if why := next(filter(None, reasons), ""):
            if wanted != "auto":
                LOG.info(f"--steps_per_call {wanted} trains one step per call: {why}.")
            return 1
        if wanted != "auto":
            return int(wanted)
        # On a GPU single steps overlap with the host; clocks are off in deterministic mode.
        return 1 if tf.config.get_visible_devices("GPU") or self._job.config.deterministic else 0

    def _why_single(self) -> str:
        job = self._job
        if job.batches.is_counted:
            return "the samples of a step are known only after the step before it"
        if job.config.profile is not None:
            return "--profile shows single steps"
        if job.plan.order.global_batch_size < job.collective.world.size:
            return "the global batch is smaller than the number of ranks"
        return why_single_steps(job.step)

    def num_steps_after(self, step: int) -> int:
        """Collective."""
        if not self._max_steps:
            self._time(step)
        if self._max_steps <= 1 or step < self._first_of_many:
            return 1
        end = min(step + self._max_steps, self._job.plan.total_steps)
        last = step
        while last < end and self._is_usual(last):
            last += 1
            if any(action.is_due(last, is_last=last == self._job.plan.total_steps) for action in self._actions):
                break
        return max(last - step, 1)

    def _is_usual(self, step: int) -> bool:
        """The last step of an epoch may have fewer samples; ``step`` is from 0."""
        order = self._job.plan.order
        return order.global_count(step) == order.global_batch_size

    def _time(self, step: int) -> None:
        """Choose once enough steps are timed, by the slowest rank."""
        self._moments.append(time.perf_counter())
        if step < self._first_of_many + TIMED_STEPS:
            return
        seconds = [later - earlier for earlier, later in itertools.pairwise(self._moments)]
        mine = statistics.median(seconds[-TIMED_STEPS:]), seconds[0]
        all_seconds = all_gather_object(self._job.collective, mine, name="step_seconds")
        of_step, of_first = map(max, zip(*all_seconds, strict=True))
        saved = min(SAVED_SHARE * of_step, SAVED_SECONDS) * (self._job.plan.total_steps - step)
        is_worth_compiling = saved > of_first  # the first step compiles about as much
        self._max_steps = min(max(int(CALL_SECONDS / of_step), 1), MAX_STEPS_PER_CALL) if is_worth_compiling else 1
