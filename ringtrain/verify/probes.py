"""Tests of a trained job."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.data.pipeline import Batch
from ringtrain.training.job import Job

HUGE_SCALE = 2.0**127  # of a loss; half-precision gradients overflow


def draws_by_rank(job: Job, tolerance: float) -> bool:
    """Compare gradients and sums of a batch with the random numbers of two ranks, in one process. Trains nothing."""
    local_gradients = job.step.local_gradients
    if local_gradients.needs_every_rank or not job.batches.can_begin_again or job.collective.world.size > 1:
        return False
    batch = next(iter(job.batches))
    count = tf.shape(batch.indices, tf.int64)[0]

    def compute_as(rank: int) -> list[np.ndarray]:
        @tf.function(autograph=False)
        def compute() -> list[tf.Tensor]:
            forward = local_gradients(batch, count)
            return [*map(tf.convert_to_tensor, forward.gradients), forward.sums]

        with local_gradients.drawing_as(rank):
            return [tensor.numpy() for tensor in compute()]

    first = compute_as(0)
    second = compute_as(1)
    largest = max(float(np.max(np.abs(tensor), initial=0.0)) for tensor in first)
    differences = [np.max(np.abs(a - b), initial=0.0) for a, b in zip(first, second, strict=True)]
    return max(differences) > 100 * tolerance * largest


def depends_on_other_samples(job: Job, tolerance: float) -> bool:
    """Compare gradients and sums of a batch with those of its halves, in one process. Trains nothing."""
    gradients = job.step.local_gradients
    if gradients.needs_every_rank or not job.batches.can_begin_again or job.collective.world.size > 1:
        return False
    batch = next(iter(job.batches))
    count = int(batch.indices.shape[0])
    if count < 2:
        return False

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)] * 2, autograph=False)
    def compute(start: tf.Tensor, end: tf.Tensor) -> list[tf.Tensor]:
        part = batch._replace(**tf.nest.map_structure(lambda rows: rows[start:end], {"x": batch.x, "y": batch.y}))
        forward = gradients(part._replace(indices=batch.indices[start:end]), end - start)
        return [*map(tf.convert_to_tensor, forward.gradients), forward.sums]

    ranges = ((0, count), (0, count // 2), (count // 2, count))
    whole, first, second = ([tensor.numpy() for tensor in compute(*each)] for each in ranges)
    largest = max(float(np.max(np.abs(tensor), initial=0.0)) for tensor in whole)
    differences = [np.max(np.abs(a - b - c), initial=0.0) for a, b, c in zip(whole, first, second, strict=True)]
    return max(differences) > 100 * tolerance * largest


def try_nonfinite(job: Job, batch: Batch | None) -> list[str]:
    """Return errors of all ranks after a step that is non-finite on the last rank with samples. Collective.

    With a loss scale, only gradients overflow. Otherwise the last weight is NaN (in earlier ones some layers raise).
    """
    assert batch is not None
    step, collective, rank = job.step, job.collective, job.collective.world.rank
    counts = all_gather_object(collective, int(batch.indices.shape[0]), name="nonfinite/counts")
    chosen = max(number for number, count in enumerate(counts) if count)
    weights = [weight for weight in step.model.trainable_variables if tf.as_dtype(weight.dtype).is_floating]
    spoiled = step.loss_scale.variables[:1] or weights[-1:]
    value = HUGE_SCALE if step.loss_scale.is_dynamic else np.nan
    before = {name: digest(variable) for name, variable in step.named_variables.items()}
    kept = [variable.numpy() for variable in spoiled]
    if rank == chosen:
        for variable in spoiled:
            variable.assign(tf.fill(variable.shape, tf.constant(value, variable.dtype)))
    scale = float(step.loss_scale.value)
    report = step.read(step(batch, job.plan.learning_rate(0)))
    has_scale = not step.loss_scale.is_dynamic or float(step.loss_scale.value) == scale / 2
    if rank == chosen:
        for variable, number in zip(spoiled, kept, strict=True):
            variable.assign(number)
    if all(all_gather_object(collective, bool(report.is_finite), name="nonfinite/votes")):
        return report_by_rank(collective, find_nan(step.named_variables), "has NaN in {}")  # a loss may hide it
    changed = [
        name
        for name, variable in step.named_variables.items()
        if not name.startswith("loss_scale/") and digest(variable) != before[name]
    ]
    return [
        *report_by_rank(collective, ["it"] if report.is_finite else [], "takes {} as finite"),
        *report_by_rank(collective, changed, "changed {}"),
        *report_by_rank(collective, [] if has_scale else ["loss scale"], "did not halve its {}"),
    ]


def report_by_rank(collective: Collective, mine: Sequence[str], words: str) -> list[str]:
    """Report the first item of each rank. Collective."""
    found = all_gather_object(collective, list(mine), name="nonfinite")
    return [f"rank {rank} {words.format(names[0])}" for rank, names in enumerate(found) if names]


def find_nan(variables: Mapping[str, keras.Variable]) -> list[str]:
    floats = {name: v for name, v in variables.items() if tf.as_dtype(v.dtype).is_floating}
    return [name for name, v in floats.items() if not np.isfinite(v.numpy().astype(np.float64)).all()]


def digest(variable: keras.Variable) -> str:
    return hashlib.sha256(np.asarray(variable.numpy()).tobytes()).hexdigest()
