"""Whole numbers and booleans that a model updates in its forward pass are on all ranks those of one process."""

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.config import Config
from ringtrain.errors import UsageError
from ringtrain.messages.log import show_log
from ringtrain.step.state import from_sums, to_summands
from ringtrain.training.job import create_job
from ringtrain.training.loop import run_steps
from ringtrain.training.session import RunSession
from ringtrain.verify.record import create_recorded_job
from ringtrain.verify.trials import plan_trials
from tests.world.group import Launch, on_ranks
from tests.world.training import (
    NUM_CLASSES,
    NUM_FEATURES,
    OPTIMIZERS,
    Classification,
    batches_of,
    batchnorm_model,
    check_trains_as_plainly,
    create_step,
    dense_samples,
)

GLOBAL_BATCH_SIZE, STEPS = 11, 8  # the fifth step of an epoch has one of the 45 samples, so that one rank has any
LARGE = 2**53 + 1  # float64 does not hold it


class Annealing(keras.layers.Layer):
    """Outputs shrink with the number of steps; tables, large numbers and flags change with it."""

    def build(self, shape: Any) -> None:
        zeros = keras.initializers.Zeros()
        self.steps = self.add_weight(name="steps", shape=(), dtype="int64", initializer=zeros, trainable=False)
        self.table = self.add_weight(name="table", shape=(2, 3), dtype="int32", initializer=zeros, trainable=False)
        self.large = self.add_weight(name="large", shape=(), dtype="uint64", initializer=zeros, trainable=False)
        self.is_even = self.add_weight(name="is_even", shape=(), dtype="bool", initializer=zeros, trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign(self.steps + 1)
            self.table.assign(self.table - tf.constant([[1, 0, 2], [0, -3, 0]]))
            self.large.assign(tf.cast(self.steps.value, tf.uint64) + LARGE)
            self.is_even.assign(tf.equal(self.steps.value % 2, 0))
        return inputs / tf.cast(1 + self.steps.value, inputs.dtype)


def annealing_model() -> keras.Model:
    return keras.Sequential([keras.Input((NUM_FEATURES,)), Annealing(), keras.layers.Dense(NUM_CLASSES)])


class CountsSamples(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(name="seen", shape=(), dtype="int64", initializer="zeros", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.seen.assign(self.seen + tf.shape(inputs, tf.int64)[0])
        return inputs


def counting_model() -> keras.Model:
    return keras.Sequential([keras.Input((NUM_FEATURES,)), CountsSamples(), keras.layers.Dense(NUM_CLASSES)])


@pytest.mark.parametrize(("shard_optimizer", "accumulate"), [(False, 1), (True, 1), (False, 3)])
@on_ranks(3, slow=[1])
def test_n_ranks_count_steps_as_one_process(collective: Collective, shard_optimizer: bool, accumulate: int) -> None:
    """With three micro-batches at most, too, of which the ranks have different numbers."""
    source = dense_samples(45)
    batches = batches_of(source, collective, global_batch_size=GLOBAL_BATCH_SIZE, steps=STEPS)
    shard_optimizer &= collective.world.size > 1
    step = create_step(
        collective,
        annealing_model,
        OPTIMIZERS["momentum"],
        batches.element_spec,
        shard_optimizer=shard_optimizer,
        accumulate=accumulate,
    )
    check_trains_as_plainly(
        step,
        batches,
        annealing_model,
        OPTIMIZERS["momentum"],
        source,
        collective,
        global_batch_size=GLOBAL_BATCH_SIZE,
        steps=STEPS,
    )
    layer = step.model.layers[0]
    assert int(layer.steps.numpy()) == STEPS
    assert int(layer.large.numpy()) == LARGE + STEPS
    assert layer.is_even.numpy()
    np.testing.assert_array_equal(layer.table.numpy(), STEPS * np.array([[-1, 0, -2], [0, 3, 0]]))


@pytest.mark.slow
@on_ranks(Launch(12), timeout=300)
def test_many_ranks_count_steps_as_one_process(collective: Collective) -> None:
    test_n_ranks_count_steps_as_one_process.body(collective, shard_optimizer=True, accumulate=1)


@on_ranks(3, slow=[2])
def test_integer_state_that_differs_between_ranks_is_refused(collective: Collective) -> None:
    config = Config(steps=2, global_batch_size=GLOBAL_BATCH_SIZE)
    job = create_job(Classification(counting_model), config, collective, num_threads=1)
    before = [variable.numpy() for variable in job.step.variables]
    with pytest.raises(UsageError, match=r"variable \S*seen \(int64\) has different values .* after step 1") as caught:
        run_steps(job, RunSession(job.config, collective), [])
    for variable, value in zip(job.step.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert len(set(all_gather_object(collective, str(caught.value), name="message"))) == 1


@pytest.mark.parametrize("accumulate", [1, 2])
@on_ranks(1, 2)
def test_state_updated_by_micro_batches_is_named_at_the_start(collective: Collective, accumulate: int) -> None:
    lines: list[str] = []
    config = Config(steps=1, global_batch_size=GLOBAL_BATCH_SIZE, accumulate=accumulate)
    workload = Classification(batchnorm_model)
    with show_log(lines.append):
        create_job(workload, config, collective, num_threads=1)
    is_inexact = accumulate > 1 and collective.world.size > 1
    found = [line for line in lines if "once for each micro-batch" in line]
    assert len(found) == is_inexact
    if is_inexact:
        assert re.search(r"--accumulate 2 updates \S*/moving_mean and 1 more once", found[0])


@on_ranks(1)
def test_verify_names_state_that_micro_batches_update(collective: Collective) -> None:
    config = Config(steps=1, global_batch_size=GLOBAL_BATCH_SIZE, accumulate=2, precision="float64")
    trial, *_ = plan_trials(config, is_reference=True)
    _, notes = create_recorded_job(Classification(batchnorm_model), trial, collective, freezes=False)
    assert [note for note in notes if "/moving_mean: each micro-batch of --accumulate updates it" in note]


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8", "uint64", "bool"])
def test_whole_numbers_survive_the_sum_exactly(dtype: str) -> None:
    """Also the extremes, for as many ranks as are allowed; one rank that differs by 1 is seen."""
    limits = (False, True) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    variable = keras.Variable(np.array([*limits, 1, 0], dtype), dtype=dtype)
    one = tf.constant(1, tf.int64)
    mine = to_summands([tf.convert_to_tensor(variable.value)], local_count=one, global_count=one)
    for num_ranks in (1, 3, 1448):
        values, divergent = from_sums([num_ranks * summand for summand in mine], [variable])
        assert int(divergent) == 0
        np.testing.assert_array_equal(values[0].numpy(), variable.numpy())
        assert values[0].dtype == variable.dtype
    odd = tf.constant(np.array([limits[0], limits[1], 0, 0], dtype))
    other = to_summands([odd], local_count=one, global_count=one)
    _, divergent = from_sums([1447 * a + b for a, b in zip(mine, other, strict=True)], [variable])
    assert int(divergent) == 1
