"""Steps whose loss or gradient is not finite: what becomes of them, and which samples of which rank it was."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from ringtrain.collectives import gather_objects
from ringtrain.console import Console
from ringtrain.data.pipeline import Batch
from ringtrain.errors import DivergedError
from ringtrain.job import Job
from ringtrain.loss_scale import MIN_LOSS_SCALE
from ringtrain.progress import Progress
from ringtrain.step import StepReport
from ringtrain.workloads.values import per_sample

MAX_SKIPPED_IN_A_ROW = 10
MAX_NAMED = 10


class NonfiniteGuard:
    """Decides, alike on every rank, about steps whose loss or gradient was not finite."""

    def __init__(self, job: Job, console: Console, progress: Progress) -> None:
        self._job, self._console, self._progress = job, console, progress

    def check(self, step: int, batch: Batch, returned: tf.Tensor) -> None:
        """Look at the outcome of a step; ``batch`` is this rank's.

        Raises:
            DivergedError: on every rank, where the step changed nothing and the run is not to go on.
        """
        if self._job.step.is_updated(returned):
            self._progress.skipped_in_a_row = 0
            return
        report = self._job.step.read(returned)
        if self._job.config.precision == "mixed_float16" and report.loss_scale > MIN_LOSS_SCALE:
            return  # the loss scale was too high; it has been halved, and that is how it finds its value
        self._progress.skipped_in_a_row += 1
        message = self._explain(step, batch, report)
        if self._job.config.on_nonfinite == "stop":
            raise DivergedError(
                f"{message} Nothing was updated by this step. Lower --optimizer.lr, add --optimizer.clip_global_norm "
                "or --optimizer.warmup_epochs, look at the data, or go on with --on_nonfinite skip.",
                reach="run",
            )
        if self._progress.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise DivergedError(f"{message} That is {MAX_SKIPPED_IN_A_ROW} skipped steps in a row.", reach="run")
        self._console.line(f"warning: {message} Skipped: nothing was updated by this step.")

    def _explain(self, step: int, batch: Batch, report: StepReport) -> str:
        """Who had it: every rank is here, for the same reduced numbers."""
        collective = self._job.collective
        mine = {
            "node": collective.world.node,
            "loss": report.local_data_loss if math.isfinite(report.local_data_loss) else str(report.local_data_loss),
            "samples": find_nonfinite_samples(self._job, batch),
        }
        ranks = gather_objects(collective, mine, name="nonfinite")
        culprits = [
            f"rank {rank} on {item['node']} ({describe_samples(item['samples'], item['loss'])})"
            for rank, item in enumerate(ranks)
            if item["samples"] or isinstance(item["loss"], str)
        ]
        who = " and ".join(culprits) or "no rank's loss, so only in a gradient (an overflow in the backward pass)"
        return f"step {step}: loss or gradient is not finite; seen in the loss of {who}."


def find_nonfinite_samples(job: Job, batch: Batch) -> list[int]:
    """The numbers of a batch's samples whose x or y is not finite; where all are, those whose loss is not.

    The model runs as in inference: each sample by itself, and without any collective.
    """
    if not batch.indices.shape[0]:
        return []
    arrays = [array.numpy() for array in tf.nest.flatten((batch.x, batch.y)) if array.dtype.is_floating]
    are_bad = np.zeros(batch.indices.shape[0], bool)
    for array in arrays:
        are_bad |= ~np.isfinite(array.astype(np.float64)).all(axis=tuple(range(1, array.ndim)))
    if not are_bad.any():
        losses, _ = per_sample(job.workload, batch.y, job.step.model(batch.x, training=False))
        are_bad = ~np.isfinite(losses.numpy().astype(np.float64))
    return [int(number) for number in batch.indices.numpy()[are_bad]]


def describe_samples(samples: list[int], loss: str | float) -> str:
    """A rank's samples in words; the sum of their losses where none stands out."""
    if not samples:
        return f"sum of its samples' losses: {loss}"
    more = f" and {len(samples) - MAX_NAMED} more" if len(samples) > MAX_NAMED else ""
    return f"sample{'s' if len(samples) > 1 else ''} {', '.join(map(str, sorted(samples)[:MAX_NAMED]))}{more}"
