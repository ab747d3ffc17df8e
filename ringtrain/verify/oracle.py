"""A plain Keras loop as the reference for one process of ringtrain.

It shares no code with step, reduction or evaluation. A step's samples are the compared run's (see ``check_ledger``);
their number is computed independently.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective
from ringtrain.config import OPTIMIZER_CLASSES, Config
from ringtrain.data.augment import sample_keys
from ringtrain.data.sources import Feed, Source
from ringtrain.errors import UsageError
from ringtrain.run.variables import name_variables, named_slots, named_weights
from ringtrain.runtime.private import exclude_paths_from_decay
from ringtrain.step.optimizers import OWN
from ringtrain.step.train_step import set_precision
from ringtrain.training.creation import choose_optimizer
from ringtrain.training.job import Job
from ringtrain.verify.draws import SharedDraws, share_draws_of_loss
from ringtrain.verify.precision import widened
from ringtrain.verify.record import create_recorded_job, make_comparable, record_job
from ringtrain.verify.trials import plan_trials
from ringtrain.workloads.base import Workload
from ringtrain.workloads.values import as_computed, per_sample

EVALUATED_AT_ONCE = 256


def record_with_oracle(workload: Workload, config: Config, collective: Collective, directory: Path) -> None:
    """Write ``float64.npz``, ``float64-perturbed.npz`` and ``plain.npz``. Local BatchNorm is included."""
    trial, *_ = plan_trials(config, is_reference=True)
    with widened("float64"):
        job, notes = create_recorded_job(workload, trial, collective, freezes=False)
        first = [variable.numpy() for _, variable in named_weights(job.step.model)]
        record_job(job, notes, directory, trial, is_reference=True)
        with np.load(directory / "float64.npz", allow_pickle=False) as archive:
            np.savez(directory / "plain.npz", **train_oracle(workload, trial.config, job, first, archive["samples"]))


def train_oracle(
    workload: Workload, config: Config, job: Job, first: Sequence[np.ndarray], samples: np.ndarray
) -> dict[str, Any]:
    """``samples`` are the job's, int64 [n]."""
    keras.utils.clear_session()  # equal names as in the job
    model = workload.create_model()
    set_precision("float64")
    draws = SharedDraws(model)
    model.call = draws.wrap(model.call)
    workload = copy.copy(workload)
    share_draws_of_loss(workload, draws)
    make_comparable(model, freezes=False)
    for (_, variable), value in zip(named_weights(model), first, strict=True):
        variable.assign(value)
    optimizer = choose_optimizer(workload, config, job.plan.learning_rate(0))
    plain_class = getattr(keras.optimizers, OPTIMIZER_CLASSES[config.optimizer.name], None)
    if type(optimizer) in OWN.values() and plain_class is not None:
        optimizer = plain_class.from_config(optimizer.get_config())
        if words := config.optimizer.excluded_words:
            exclude_paths_from_decay(optimizer, words)
    optimizer.build(model.trainable_variables)
    sources = workload.create_sources(config.data_dir, synthetic=config.synthetic)
    if isinstance(sources.train, Feed):
        raise UsageError(
            "verify --oracle reads the samples by number, and this workload's come from a pipeline. Leave --oracle out."
        )
    train = sources.train
    num_samples, batch_size = train.num_samples, job.plan.order.global_batch_size
    sizes = [min(batch_size, num_samples - start) for start in range(0, num_samples, batch_size)]
    counts = [sizes[step % len(sizes)] for step in range(job.plan.total_steps)]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)], autograph=False)
    def read(indices: tf.Tensor, epoch: tf.Tensor) -> Any:
        x, y = train.gather(indices)
        return workload.augment(x, y, sample_keys(config.seed, epoch, indices))

    losses, seen = [], 0
    averaged = model.trainable_variables if config.optimizer.ema else []
    averages = [weight.numpy() for weight in averaged]
    for step, count in enumerate(counts):
        x, y = read(samples[seen : seen + count], step // len(sizes))
        if isinstance(optimizer.get_config().get("learning_rate"), float):
            optimizer.learning_rate = job.plan.learning_rate(seen)
        losses.append(train_step_plainly(workload, model, optimizer, x, y, count, accumulate=config.accumulate))
        decay = min(config.optimizer.ema, (2 + step) / (11 + step))
        averages = [decay * a + (1 - decay) * w.numpy() for a, w in zip(averages, averaged, strict=True)]
        seen += count
    trained = name_variables(weights=named_weights(model), slots=named_slots(optimizer))
    return {
        "losses": np.array(losses),
        **{name: variable.numpy() for name, variable in trained.items()},
        **{f"averages/{weight.path}": average for weight, average in zip(averaged, averages, strict=True)},
        "evaluation": np.array(evaluate_plainly(workload, model, sources.evaluation, averages)),
        "samples": samples,
        "samples_per_step": np.array(counts),
        "steps_per_epoch": len(sizes),
        "num_samples": num_samples,
    }


def train_step_plainly(
    workload: Workload, model: keras.Model, optimizer: Any, x: Any, y: Any, count: int, *, accumulate: int
) -> float:
    weights = model.trainable_variables
    gradients = [tf.zeros(weight.shape, weight.dtype) for weight in weights]
    total, size = 0.0, -(-count // accumulate)
    for start in range(0, count, size):
        part_x, part_y = tf.nest.map_structure(lambda tensor: tensor[start : start + size], (x, y))  # noqa: B023
        with tf.GradientTape() as tape:
            losses, _ = per_sample(workload, part_y, model(part_x, training=True))
            objective = tf.cast(tf.reduce_mean(losses), tf.float64) + sum(model.losses)
            objective *= min(size, count - start) / count
        parts = tape.gradient(objective, [weight.value for weight in weights], unconnected_gradients="zero")
        gradients = [gradient + tf.convert_to_tensor(part) for gradient, part in zip(gradients, parts, strict=True)]
        total += float(objective)
    optimizer.apply(gradients, weights)
    return total


def evaluate_plainly(
    workload: Workload, model: keras.Model, source: Source | None, averages: Sequence[np.ndarray]
) -> list[float]:
    if source is None:
        return []
    for weight, average in zip(model.trainable_variables if averages else (), averages, strict=True):
        weight.assign(average)
    values: dict[str, list[np.ndarray]] = {}
    stateful_metrics = workload.create_metrics()
    for start in range(0, source.num_samples, EVALUATED_AT_ONCE):
        x, y = source.gather(tf.range(start, min(start + EVALUATED_AT_ONCE, source.num_samples), dtype=tf.int64))
        outputs = model(x, training=False)
        losses, metrics = per_sample(workload, y, outputs)
        targets, predictions = as_computed(y, outputs)
        for metric in stateful_metrics.values():
            metric.update_state(targets, predictions)
        for name, of_samples in {"": losses, **metrics}.items():  # "" sorts the loss before all metrics
            values.setdefault(name, []).append(of_samples.numpy())
    penalty = sum(float(weight.regularizer(weight)) for weight in model.trainable_variables if weight.regularizer)
    loss, *others = [np.mean(np.concatenate(values[name]), dtype=np.float64) for name in sorted(values)]
    stateful_values = [float(metric.result()) for metric in stateful_metrics.values()]
    return [source.num_samples, loss + penalty, *others, *stateful_values]
