"""Variables that a forward pass assigns, whoever lists them: state of rows, shared state, weights."""

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.config import make_config
from ringtrain.data.sources import from_arrays
from ringtrain.errors import UsageError
from ringtrain.training.job import Job, create_job
from ringtrain.training.loop import run_steps
from ringtrain.training.session import RunSession
from ringtrain.verify.record import create_recorded_job
from ringtrain.verify.trials import plan_trials
from ringtrain.workloads.base import Sources
from tests.world.conftest import RunRingtrain
from tests.world.group import BY_MPI, on_ranks
from tests.world.processes import REPOSITORY
from tests.world.running import digest, events, final_checkpoint, run_to_end
from tests.world.training import assert_same_bits_on_all_ranks
from tests.world.workloads.rows import GLOBAL_BATCH_SIZE, TIME_STEPS, Rows, create_recurrent, samples

WORKLOAD = f"{REPOSITORY}/tests/world/workloads/rows.py:Rows"
STEPS, LEARNING_RATE = 6, 0.05


class OwnModel(Rows):
    """The same samples, for another model."""

    def __init__(self, create: Callable[[int], keras.Model], batch_size: int) -> None:
        self._create = create
        self._batch_size = batch_size

    def create_model(self) -> keras.Model:
        return self._create(self._batch_size)


class Memory(keras.layers.Layer):
    """Adds what it kept of the sample in the same row of the batch before, in a weight that Keras lists."""

    def build(self, shape: Any) -> None:
        self.kept = self.add_weight(name="kept", shape=(shape[0], shape[-1]), initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        outputs = inputs + self.kept.value[:, None, :]
        self.kept.assign(tf.reduce_mean(outputs, axis=1) / 2)
        return outputs


def memory_model(batch_size: int) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [Memory(name="memory"), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input(batch_shape=(batch_size, TIME_STEPS, 2)), *layers])


MODELS = {"recurrent": create_recurrent, "own": memory_model}


def start_job(collective: Collective, create: Callable[[int], keras.Model], **settings: Any) -> Job:
    keras.utils.clear_session(free_memory=False)
    local_batch_size = GLOBAL_BATCH_SIZE // collective.world.size
    given = {"steps": STEPS, "optimizer": {"name": "sgd", "lr": LEARNING_RATE}, **settings}
    config = make_config(given, Rows.defaults, {})
    job = create_job(OwnModel(create, local_batch_size), config, collective, num_threads=1)
    job.step.share_values(collective)
    return job


def train_plainly(job: Job, create: Callable[[int], keras.Model], steps: int = STEPS) -> keras.Model:
    """Train whole global batches with Keras alone, eagerly."""
    model = create(GLOBAL_BATCH_SIZE)
    x, y = samples()
    optimizer = keras.optimizers.SGD(LEARNING_RATE)
    for step in range(steps):
        rows = job.plan.order.local_batch(step, rank=0, size=1).indices
        with tf.GradientTape() as tape:
            losses = keras.losses.mean_squared_error(y[rows], model(x[rows], training=True))
            loss = tf.reduce_mean(losses)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, [weight.value for weight in weights]), weights)
    return model


def row_state_of(model: keras.Model) -> list[np.ndarray]:
    states = [layer.kept for layer in model.layers if isinstance(layer, Memory)]
    for layer in model.layers:
        if getattr(layer, "stateful", False):
            states += tf.nest.flatten(layer.states)
    assert states
    return [state.numpy() for state in states]


@pytest.mark.parametrize(
    ("kind", "steps_per_call", "shard_optimizer"),
    [("recurrent", "1", False), ("recurrent", "3", True), ("own", "1", False)],
)
@on_ranks(1, 2, 3, BY_MPI)
def test_each_rank_keeps_the_state_of_its_own_rows(
    collective: Collective, kind: str, steps_per_call: str, shard_optimizer: bool
) -> None:
    world = collective.world
    settings = {"steps_per_call": steps_per_call, "shard_optimizer": shard_optimizer and world.size > 1}
    job = start_job(collective, MODELS[kind], **settings)
    run_steps(job, RunSession(job.config, collective), [])
    reference = train_plainly(job, MODELS[kind])
    assert_same_bits_on_all_ranks(job.step.variables, collective)
    for own, expected in zip(job.step.model.trainable_variables, reference.trainable_variables, strict=True):
        np.testing.assert_allclose(own.numpy(), expected.numpy(), rtol=0, atol=1e-10)
    local_size = GLOBAL_BATCH_SIZE // world.size
    own_rows = slice(world.rank * local_size, (world.rank + 1) * local_size)
    for own, expected in zip(row_state_of(job.step.model), row_state_of(reference), strict=True):
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(own, expected[own_rows], rtol=0, atol=1e-10)


@on_ranks(2, slow=[1, 3])
def test_a_skipped_step_and_an_evaluation_leave_row_state_unchanged(collective: Collective) -> None:
    job = start_job(collective, create_recurrent)
    batches = iter(job.times.waiting_for(job.batches))
    job.batches.begin()
    job.step(next(batches), 0.1)
    before = [state.tobytes() for state in row_state_of(job.step.model)]
    first = job.evaluate()
    assert first == job.evaluate(), "an evaluation begins with rows of its own"
    assert [state.tobytes() for state in row_state_of(job.step.model)] == before
    batch = next(batches)
    if collective.world.is_rank0:
        batch = batch._replace(x=batch.x * np.nan)
    report = job.step.read(job.step(batch, 0.1))
    assert not report.is_finite
    assert [state.tobytes() for state in row_state_of(job.step.model)] == before
    job.step(next(batches), 0.1)
    assert [state.tobytes() for state in row_state_of(job.step.model)] != before


@on_ranks(2, slow=[1, 3])
def test_an_evaluation_carries_its_rows_from_batch_to_batch(collective: Collective) -> None:
    job = start_job(collective, create_recurrent)
    result = job.evaluate()
    reference = create_recurrent(GLOBAL_BATCH_SIZE)
    x, y = samples()
    losses = []
    for first in (0, GLOBAL_BATCH_SIZE):
        rows = slice(first, first + GLOBAL_BATCH_SIZE)
        losses.append(keras.losses.mean_squared_error(y[rows], reference(x[rows], training=False)))
    assert result is not None
    assert result.data_loss == pytest.approx(np.mean(losses), rel=1e-12)


class Unlisted(keras.layers.Layer):
    """Halves its scale in each step, in a variable that Keras does not list."""

    def build(self, shape: Any) -> None:
        scale = keras.Variable(1.0, trainable=False, dtype="float64", name="scale")
        self.hidden = types.SimpleNamespace(scale=scale)

    def call(self, inputs: Any, training: bool = False) -> Any:
        scale = self.hidden.scale
        if training:
            scale.assign(scale / 2)
        return inputs * scale


def unlisted_model(batch_size: int) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Flatten(), Unlisted(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((TIME_STEPS, 2)), *layers])


@pytest.mark.parametrize("accumulate", [1, 2])
@on_ranks(2, slow=[1, 3])
def test_state_that_keras_does_not_list_is_trained_shared_and_saved(collective: Collective, accumulate: int) -> None:
    job = start_job(collective, unlisted_model, accumulate=accumulate)
    run_steps(job, RunSession(job.config, collective), [])
    [name] = [name for name in job.step.named_variables if name.startswith("state/")]
    num_micro_batches = STEPS * accumulate
    assert job.step.named_variables[name].numpy() == 0.5**num_micro_batches
    assert_same_bits_on_all_ranks(job.step.variables, collective)


def spectral_model(batch_size: int) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Flatten(), keras.layers.SpectralNormalization(keras.layers.Dense(4)), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((TIME_STEPS, 2)), *layers])


@on_ranks(1, 2, 3)
def test_weights_that_the_forward_pass_changes_are_trained_as_in_plain_keras(collective: Collective) -> None:
    job = start_job(collective, spectral_model)
    run_steps(job, RunSession(job.config, collective), [])
    assert_same_bits_on_all_ranks(job.step.variables, collective)
    for own, expected in zip(job.step.model.variables, train_plainly(job, spectral_model).variables, strict=True):
        np.testing.assert_allclose(own.numpy(), expected.numpy(), rtol=0, atol=1e-10, err_msg=own.path)


class Counting(keras.layers.Layer):
    """Counts calls in a variable of TensorFlow's."""

    def build(self, shape: Any) -> None:
        self.count = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def call(self, inputs: Any) -> Any:
        self.count.assign_add(1.0)
        return inputs * tf.minimum(self.count, 1.0)


def counting_model(batch_size: int) -> keras.Model:
    layers = [keras.layers.Flatten(), Counting(name="counting"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((TIME_STEPS, 2)), *layers])


def ragged(job_sources: Callable[[], Sources], keep: int) -> Sources:
    x, y = samples()
    return job_sources()._replace(train=from_arrays(x[:keep], y[:keep]))


@contextlib.contextmanager
def refusing(pattern: str) -> Iterator[None]:
    with pytest.raises(UsageError, match=re.compile(pattern, re.DOTALL)):
        yield


@on_ranks(2, slow=[1])
def test_what_cannot_be_right_is_refused_by_the_layer_s_name(collective: Collective) -> None:
    with refusing(r"--accumulate 2: \S*memory/\S+ holds a row .* Leave --accumulate out"):
        start_job(collective, create_recurrent, accumulate=2)
    with refusing(r"--accumulate 2: .* changes the weight \S*dense\S*/kernel"):
        start_job(collective, spectral_model, accumulate=2)
    if collective.world.size > 1:
        with refusing(r"shard_optimizer is true, .* changes the weight"):
            start_job(collective, spectral_model, shard_optimizer=True)
    with refusing(r"assigns a TensorFlow variable, by \S*counting\S*Assign.*add_weight"):
        start_job(collective, counting_model)
    workload = Rows()
    workload.options = {"left_out": 2}  # type: ignore[misc]
    config = make_config({}, Rows.defaults, {})
    size = collective.world.size
    with refusing(rf"a batch has {4 // size} samples, but \S*memory/\S+ holds the state of {6 // size} rows"):
        create_job(workload, config, collective, num_threads=1)


@on_ranks(1)
def test_verify_refuses_row_state_by_the_layer_s_name(collective: Collective) -> None:
    for create in (create_recurrent, memory_model):
        [trial, *_] = plan_trials(make_config({}, Rows.defaults, {}), is_reference=True)
        with refusing(r"^\S*memory/\S+ holds the state of the rows of each rank's batches.*nothing can be compared"):
            create_recorded_job(OwnModel(create, GLOBAL_BATCH_SIZE), trial, collective)


def test_row_state_is_resumed_bit_for_bit_on_as_many_ranks(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    flags = ("--deterministic", "true", "--eval_every", "3", "--steps_per_call", "2")
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run_to_end(whole, *flags, "--steps", "6", workload=WORKLOAD)
    run_to_end(halves, *flags, "--steps", "3", workload=WORKLOAD)
    refused = run_ringtrain(["--workload", WORKLOAD, "--out", halves, *flags, "--steps", "6"])
    assert refused.rc == 2
    assert re.search(
        r"begun by 2 ranks, and now there are 1: \S*memory/\S+ holds the state of the rows", refused.stderr
    )
    run_to_end(halves, *flags, "--steps", "6", workload=WORKLOAD)
    assert digest(final_checkpoint(halves, 6)) == digest(final_checkpoint(whole, 6))
    for kind in ("train", "eval"):
        assert [e["loss"] for e in events(halves, kind)][-2:] == [e["loss"] for e in events(whole, kind)][-2:]
    evaluated = run_ringtrain(["eval", whole, "--checkpoint", "newest", "--workload", WORKLOAD])
    assert f"eval loss = {events(whole, 'eval')[-1]['loss']:.4g}" in evaluated.stdout, evaluated.stderr


class Unseeded(keras.layers.Layer):
    """Draws by the generator that Keras keeps for draws without a seed."""

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal((1,), dtype=inputs.dtype)


def unseeded_model(batch_size: int) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Flatten(), Unseeded(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((TIME_STEPS, 2)), *layers])


@on_ranks(2, slow=[1, 3])
def test_draws_without_a_seed_differ_from_step_to_step_and_from_rank_to_rank(collective: Collective) -> None:
    job = start_job(collective, unseeded_model)
    job.batches.begin()
    batch = next(iter(job.times.waiting_for(job.batches)))

    @tf.function(autograph=False)
    def compute(step: tf.Tensor) -> tf.Tensor:
        now = batch._replace(x=tf.zeros_like(batch.x), y=tf.zeros_like(batch.y), step=step)
        return job.step.local_gradients(now, tf.shape(now.indices, tf.int64)[0]).sums[1]

    losses = [float(compute(tf.constant(step, tf.int64))) for step in range(3)]
    seen = [loss for losses_of_rank in all_gather_object(collective, losses, name="losses") for loss in losses_of_rank]
    assert len(set(seen)) == 3 * collective.world.size, seen
