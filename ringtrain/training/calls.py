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
from ringtrain.training.actions import Action
from ringtrain.training.job import Job

CALL_SECONDS = 0.1  # a request to stop waits for the end of a call
MAX_STEPS_PER_CALL = 100  # more saves nothing
TIMED_STEPS = 10
# A step in a call of many saves this share of it, and at most so many seconds (two ranks on two cores).
SAVED_SHARE, SAVED_SECONDS = 0.2, 0.002


class Calls:
    """Calls end with the next step after which an action is due; ``--steps_per_call auto`` measures the first steps."""

    def __init__(self, job: Job, actions: Sequence[Action]) -> None:
        self._job, self._actions, self._wanted = job, actions, job.config.steps_per_call
        self._chosen_after = job.plan.first_step + (1 + TIMED_STEPS if self._wanted == "auto" else 1)
        self._first_of_many = job.plan.first_step
        self._max_steps = 1 if self._wanted == "1" else 0  # 0: not chosen yet
        self._moments: list[float] = []

    def num_steps_after(self, step: int) -> int:
        """Collective."""
        if not self._max_steps:
            self._moments.append(time.perf_counter())
            if step == self._chosen_after:
                self._max_steps = self._choose()
        if self._max_steps <= 1 or step < self._first_of_many:
            return 1
        end, order = min(step + self._max_steps, self._job.plan.total_steps), self._job.plan.order
        last = step
        while last < end and order.global_count(last) == order.global_batch_size:  # the last of an epoch may have fewer
            last += 1
            if any(action.is_due(last, is_last=last == self._job.plan.total_steps) for action in self._actions):
                break
        return max(last - step, 1)

    def _choose(self) -> int:
        """Choose by the slowest rank, and single steps if a rank has a reason. Collective."""
        job, seconds = self._job, [later - earlier for earlier, later in itertools.pairwise(self._moments)]
        of_step = statistics.median(seconds[-TIMED_STEPS:])
        # To look for a reason takes long in a large graph, whose steps are too slow for a call of many.
        is_slow = self._wanted == "auto" and 2 * of_step > CALL_SECONDS
        first = job.plan.first_step + (CHECKED_STEPS if job.labels_to_check else 1)
        mine = ["" if is_slow else self._why_single(), of_step, seconds[0], first]
        reasons, of_steps, of_firsts, firsts = zip(
            *all_gather_object(job.collective, mine, name="steps_per_call"), strict=True
        )
        self._first_of_many = max(firsts)
        if why := next(filter(None, reasons), ""):
            if self._wanted != "auto":
                LOG.info(f"--steps_per_call {self._wanted} trains one step per call: {why}.")
            return 1
        if self._wanted != "auto":
            return int(self._wanted)
        saved = min(SAVED_SHARE * max(of_steps), SAVED_SECONDS) * (job.plan.total_steps - max(firsts))
        is_worth_compiling = saved > max(of_firsts)  # the first step compiles about as much
        return min(max(int(CALL_SECONDS / max(of_steps)), 1), MAX_STEPS_PER_CALL) if is_worth_compiling else 1

    def _why_single(self) -> str:
        job = self._job
        if job.batches.why_single_steps:
            return job.batches.why_single_steps
        if job.config.profile is not None:
            return "--profile shows single steps"
        if job.plan.order.global_batch_size < job.collective.world.size:
            return "the global batch is smaller than the number of ranks"
        if self._wanted == "auto" and tf.config.get_visible_devices("GPU"):
            return "on a GPU single steps overlap with the host"
        if self._wanted == "auto" and job.config.deterministic:
            return "deterministic mode has no clock for the input"
        if python := job.step.python_operations():
            return f"the step calls Python code ({python[0]})"
        is_dense = all(isinstance(part, tf.TensorSpec) for part in tf.nest.flatten(job.step.usual_spec))
        return "" if is_dense else "the samples are ragged or sparse tensors"
