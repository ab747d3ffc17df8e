"""Non-finite loss or gradients: skip or stop; name rank and samples."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import all_gather_object, run_on_rank0
from ringtrain.data.pipeline import Batch
from ringtrain.errors import DivergedError
from ringtrain.files.atomic import replacing
from ringtrain.files.bounded import make_directory
from ringtrain.messages.rules import list_first
from ringtrain.step.loss_scale import MIN_LOSS_SCALE
from ringtrain.step.report import StepReport
from ringtrain.step.state import require_equal_state
from ringtrain.training.job import Job
from ringtrain.training.session import RunSession
from ringtrain.workloads.values import per_sample

MAX_SKIPPED_IN_A_ROW = 10
MAX_NAMED = 10
MAX_KEPT_BATCHES = 10
BATCH_DIRECTORY = "nonfinite"


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Findings of one rank, as JSON values."""

    node: str
    device: str
    loss: float | str | None  # mean; text if not finite, None without samples
    samples: list[int]
    gradients: list[str]  # weights with a non-finite local gradient, in model order
    weights: list[str] = field(default_factory=list)  # non-finite before the step, in model order

    @property
    def is_culprit(self) -> bool:
        """True if this rank's own samples gave non-finite values."""
        return bool(self.samples or self.gradients or isinstance(self.loss, str))


class NonfiniteGuard:
    """Handles non-finite steps, identically on all ranks."""

    def __init__(self, job: Job, session: RunSession) -> None:
        self._job, self._session, self._num_kept = job, session, 0

    def check(self, step: int, batch: Batch, report: StepReport) -> None:
        """Raise DivergedError if the run must stop, UsageError for model state with different integers on the ranks."""
        if report.is_finite:
            self._session.progress.skipped_in_a_row = 0
            return
        require_equal_state(int(report.divergent_state), self._job.step.state, step)
        if self._is_overflow(report):
            return  # normal search of the loss scale, which was halved
        self._session.progress.skipped_in_a_row += 1
        message, has_wrong_weights = self._explain(step, batch, report)
        if has_wrong_weights and step == 1:
            raise DivergedError(
                f"{message} They are those that create_model gives: look at its initializers and at the files that "
                "it loads. No learning rate mends them."
            )
        if self._job.config.on_nonfinite == "stop":
            raise DivergedError(
                f"{message} Nothing was updated by this step. Lower --optimizer.lr, add --optimizer.clip_global_norm "
                "or --optimizer.warmup_epochs, look at the data, or use --on_nonfinite skip."
            )
        if self._session.progress.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise DivergedError(f"{message} That is {MAX_SKIPPED_IN_A_ROW} skipped steps in a row.")
        self._session.console.line(f"warning: {message} Skipped: nothing was updated by this step.")

    def _is_overflow(self, report: StepReport) -> bool:
        """True if only the scaled loss overflowed; the reported loss is unscaled."""
        is_scaled = self._job.config.precision == "mixed_float16" and report.loss_scale > MIN_LOSS_SCALE
        return is_scaled and math.isfinite(report.loss)

    def _explain(self, step: int, batch: Batch, report: StepReport) -> tuple[str, bool]:
        """Return the findings, and whether weights were not finite before the step. Collective."""
        collective = self._job.collective
        gpus = tf.config.get_visible_devices("GPU")
        total, count = float(report.local_data_loss), batch.indices.shape[0]
        mine = RankReport(
            node=collective.world.node,
            device=f"GPU {gpus[0].name.rpartition(':')[2]}" if gpus else "its cores",
            loss=None if not count else total / count if math.isfinite(total) else str(total),
            samples=find_nonfinite_samples(self._job, batch),
            gradients=self._job.step.find_nonfinite_gradients(batch),
            weights=find_nonfinite_weights(self._job),
        )
        ranks = [RankReport(**item) for item in all_gather_object(collective, asdict(mine), name="nonfinite")]
        culprit = next((rank for rank, finding in enumerate(ranks) if finding.is_culprit), None)
        path = self._session.path
        kept = "" if culprit is None or path is None else self._keep_batch(step, batch, culprit, path)
        return f"{describe_findings(step, ranks)}{kept}", any(finding.weights for finding in ranks)

    def _keep_batch(self, step: int, batch: Batch, culprit: int, path: Path) -> str:
        """Write the culprit's batch; return a sentence with its path. Collective."""
        if self._num_kept == MAX_KEPT_BATCHES:
            return ""
        self._num_kept += 1
        collective = self._job.collective
        data = pack_batch(batch) if collective.world.rank == culprit else b""
        packed = collective.all_gather(tf.constant(np.frombuffer(data, np.uint8)), name="nonfinite/batch").numpy()
        file = path / BATCH_DIRECTORY / f"step-{step:09d}-rank-{culprit}.npz"

        def write_on_rank0() -> str:
            assert self._session.directory is not None
            self._session.directory.may_write()
            try:
                make_directory(file.parent)
                with replacing(file) as written:
                    written.write(packed.tobytes())
            except OSError as error:
                return f" The batch of rank {culprit} cannot be kept as {file}: {error.strerror or error}."
            return f" The batch of rank {culprit} is kept as {file}."

        return run_on_rank0(collective, write_on_rank0, name="nonfinite/kept")


def describe_findings(step: int, ranks: Sequence[RankReport]) -> str:
    culprits = [
        f"rank {rank} on {finding.node}, {finding.device} ({describe_samples(finding.samples, finding.loss)})"
        for rank, finding in enumerate(ranks)
        if finding.samples or isinstance(finding.loss, str)
    ]
    who = " and ".join(_first(culprits))
    seen = f"seen in the loss of {who}" if who else "every rank's loss is finite, so it came up in the backward pass"
    losses = ", ".join(_first([_in_words(finding.loss) for finding in ranks]))
    with_gradients = [(rank, finding) for rank, finding in enumerate(ranks) if finding.gradients]
    gradient = "No rank's own gradient was not finite, only the sum of all."
    if with_gradients:
        rank, finding = with_gradients[0]
        others = f" and of {len(finding.gradients) - 1} more" if len(finding.gradients) > 1 else ""
        gradient = f"At rank {rank} the gradient of {finding.gradients[0]}{others} was not finite."
    weights = ""
    with_weights = [(rank, finding) for rank, finding in enumerate(ranks) if finding.weights]
    if with_weights:
        rank, finding = with_weights[0]
        weights = f" Weights of rank {rank} were not finite before the step: {list_first(finding.weights, MAX_NAMED)}."
    found = f"step {step}: loss or gradient is not finite; {seen}. Mean losses from rank 0 on: {losses}. {gradient}"
    return found + weights


def find_nonfinite_weights(job: Job) -> list[str]:
    """Return the paths of trained weights that are NaN or infinite now, which a non-finite step has not changed."""
    wrong = []
    for weight in job.step.model.trainable_variables:
        if not np.isfinite(weight.value.numpy()).all():
            wrong.append(weight.path)
    return wrong


def find_nonfinite_samples(job: Job, batch: Batch) -> list[int]:
    """Find samples with non-finite x or y; if none, with a non-finite loss.

    Runs inference without collectives; skips losses that need other ranks.
    """
    if not batch.indices.shape[0]:
        return []
    arrays = [array.numpy() for array in tf.nest.flatten((batch.x, batch.y)) if array.dtype.is_floating]
    are_bad = np.zeros(batch.indices.shape[0], bool)
    for array in arrays:
        are_bad |= ~np.isfinite(array.astype(np.float64)).all(axis=tuple(range(1, array.ndim)))
    if not are_bad.any() and not job.workload.needs_every_rank:
        losses, _ = per_sample(job.workload, batch.y, job.step.model(batch.x, training=False))
        are_bad = ~np.isfinite(losses.numpy().astype(np.float64))
    return [int(number) for number in batch.indices.numpy()[are_bad]]


def describe_samples(samples: list[int], loss: str | float | None) -> str:
    if not samples:
        return f"mean of its samples' losses: {loss}"
    return f"sample{'s' if len(samples) > 1 else ''} {list_first(sorted(samples), MAX_NAMED)}"


def pack_batch(batch: Batch) -> bytes:
    """Return an .npz file without pickle: x, y (``x/name`` if nested), indices."""
    tensors = {"indices": batch.indices, "step": batch.step, "global_count": batch.global_count}
    tensors |= {"x": batch.x, "y": batch.y}
    values = {"/".join(map(str, path)): np.asarray(value) for path, value in keras.tree.flatten_with_path(tensors)}
    # Strings are object arrays, which would need pickle.
    plain: dict[str, Any] = {n: np.array(v.tolist()) if v.dtype.hasobject else v for n, v in values.items()}
    file = io.BytesIO()
    np.savez(file, **plain)
    return file.getvalue()


def _first(words: list[str]) -> list[str]:
    return words if len(words) <= MAX_NAMED else [*words[:MAX_NAMED], f"{len(words) - MAX_NAMED} more"]


def _in_words(loss: float | str | None) -> str:
    return "none" if loss is None else loss if isinstance(loss, str) else f"{loss:.4g}"
