"""The callbacks: what they broadcast, average and schedule."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import ringtrain.keras as hvd
from ringtrain.collectives import Collective, all_gather_object
from ringtrain.errors import UsageError
from ringtrain.run.variables import is_seed_state
from tests.keras.training import CLASSES, FEATURES, dataset, make_batches, make_model, split_batches
from tests.world.group import on_ranks

BROADCAST = hvd.callbacks.BroadcastGlobalVariablesCallback


def bits(variables: Any, collective: Collective) -> list[list[str]]:
    return all_gather_object(collective, [variable.numpy().tobytes().hex() for variable in variables], name="bits")


def rank_model(rank: int, *, knows_its_input: bool = True) -> keras.Model:
    """A model with other weights, and other dropout, on every rank."""
    keras.utils.set_random_seed(rank)
    layers = [keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((FEATURES,)), *layers] if knows_its_input else layers)


@pytest.mark.parametrize("knows_its_input", [True, False])
@on_ranks(2)
def test_all_ranks_start_from_the_root_s_weights_and_slots(collective: Collective, knows_its_input: bool) -> None:
    model = rank_model(collective.world.rank, knows_its_input=knows_its_input)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1 * (collective.world.rank + 1)))
    if collective.world.rank == 1 and knows_its_input:  # as if restored from a checkpoint
        optimizer.build(model.trainable_variables)
        optimizer.iterations.assign(10)
    model.compile(optimizer, "mean_squared_error")
    model.fit(dataset(split_batches(make_batches(4))), verbose=0, callbacks=[BROADCAST(1)])
    mine = [variable for variable in [*model.variables, *optimizer.variables] if not is_seed_state(variable)]
    ours = bits(mine, collective)
    assert ours[0] == ours[1]
    assert float(optimizer.learning_rate.numpy()) == pytest.approx(0.2)
    seeds = bits([variable for variable in model.variables if is_seed_state(variable)], collective)
    assert seeds[0] != seeds[1]


@on_ranks(2)
def test_local_variables_stay(collective: Collective) -> None:
    model = rank_model(collective.world.rank)
    before = bits(model.variables, collective)
    callback = BROADCAST(0, local_variables=[model.layers[0].kernel, model.layers[0].bias.value])
    callback.set_model(model)
    callback.on_train_begin()
    after = bits(model.variables, collective)
    assert after[1][:2] == before[1][:2]
    assert after[1][-2:] == before[0][-2:]


@on_ranks(2)
def test_one_rank_may_have_built_its_metrics_before(collective: Collective) -> None:
    """As rank 0 has, when it alone loaded a saved model."""
    model = rank_model(collective.world.rank)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mean_squared_error", metrics=["mean_absolute_error"])
    if collective.world.rank == 0:
        model.evaluate(*make_batches(2, steps=1)[0], verbose=0)
    model.fit(dataset(split_batches(make_batches(4))), verbose=0, callbacks=[BROADCAST(0)])
    ours = bits(model.trainable_variables, collective)
    assert ours[0] == ours[1]


@on_ranks(2)
def test_ranks_with_other_variables_do_not_wait_for_ever(collective: Collective) -> None:
    variables = [keras.Variable([1.0, 2.0]), *[keras.Variable(1.0) for _ in range(collective.world.rank)]]
    with pytest.raises(UsageError, match=r"rank 0 has 1 .* rank 1 has 2; .* number 1: nothing and float32 \[\]"):
        hvd.broadcast_variables(variables, root_rank=0)


@on_ranks(2)
def test_metrics_are_means_over_all_samples(collective: Collective) -> None:
    shares, model = (1, 5), make_model()
    mine, validation = split_batches(make_batches(6), shares), make_batches(6, steps=1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mean_squared_error", metrics=["mean_absolute_error"])
    history = model.fit(
        dataset(mine),
        validation_data=dataset(split_batches(validation, shares)),
        epochs=2,
        verbose=0,
        callbacks=[hvd.callbacks.MetricAverageCallback()],
    ).history
    for prefix, batches in (("", make_batches(6)), ("val_", validation)):
        x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        difference = model(x).numpy() - y
        assert history[f"{prefix}loss"] == pytest.approx([np.mean(difference**2)] * 2, rel=1e-5)
        assert history[f"{prefix}mean_absolute_error"] == pytest.approx([np.mean(np.abs(difference))] * 2, rel=1e-5)


@on_ranks(2)
def test_a_rank_without_samples_does_not_count(collective: Collective) -> None:
    model, rank = make_model(), collective.world.rank
    model.compile(keras.optimizers.SGD(), "mean_squared_error")
    callback = hvd.callbacks.MetricAverageCallback()
    callback.set_model(model)
    if rank == 0:
        model.evaluate(*make_batches(3, steps=1)[0], verbose=0)
    logs = {"loss": [2.0, float("nan")][rank], "nested": [1.0, 2.0]}
    callback.on_epoch_end(0, logs)
    assert logs == {"loss": 2.0, "nested": [1.0, 2.0]}


class RecordRates(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate.numpy()))


@on_ranks(2)
def test_rates_warm_up_and_follow_the_schedule(collective: Collective) -> None:
    model, record = make_model(), RecordRates()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.8)), "mean_squared_error")
    schedule = hvd.callbacks.LearningRateScheduleCallback
    history = model.fit(
        dataset(split_batches(make_batches(4, steps=2))),
        epochs=6,
        verbose=0,
        callbacks=[
            hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2),
            schedule(0.8, 0.5, start_epoch=2, end_epoch=4),
            schedule(0.8, lambda epoch: 1 / epoch, start_epoch=4, end_epoch=5),
            schedule(0.8, lambda epoch: 1 / epoch, start_epoch=5, staircase=False),
            record,
        ],
    ).history
    warm_up = [0.5, 0.6, 0.7, 0.8]  # with size 2: 0.4 * (epoch' / 2 + 1), epoch' = 0.5, 1, 1.5, 2
    expected = [*warm_up, 0.8, 0.8, 0.4, 0.4, 0.2, 0.2, 0.8 / 5, 0.8 / 5.5]
    assert record.rates == pytest.approx(expected, rel=1e-6)
    assert history["lr"] == pytest.approx(expected[1::2], rel=1e-6)


@on_ranks(2)
def test_velocities_follow_a_change_of_the_rate(collective: Collective) -> None:
    """Goyal et al. 2017, equation 10: v <- m (new/old) v + new g, here with g = 1 throughout."""
    for compiled in (False, True):
        variable = keras.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5))
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse", run_eagerly=not compiled)
        callback = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 1.0 if epoch == 0 else 0.1)
        callback.set_model(model)
        velocity = 0.0
        for epoch, (old, new) in enumerate([(1.0, 1.0), (1.0, 0.1), (0.1, 0.1)]):
            callback.on_epoch_begin(epoch)
            callback.on_train_batch_begin(0)
            optimizer.apply_gradients([(keras.ops.convert_to_tensor(1.0), variable)])
            velocity = 0.5 * (new / old) * velocity - new
            np.testing.assert_allclose(optimizer.momentums[0].numpy(), velocity, rtol=1e-6)


def test_a_schedule_needs_an_optimizer_without_one() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10), name="own"), "mse")
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)
    callback.set_model(model)
    with pytest.raises(UsageError, match="'own' has its own schedule"):
        callback.on_train_batch_begin(0)
    smooth = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, staircase=False)
    smooth.set_params({"steps": None})
    with pytest.raises(UsageError, match="steps_per_epoch"):
        smooth.on_train_begin()


def test_the_best_model_is_kept(tmp_path: Path) -> None:
    x, y = np.ones((4, 1)), np.zeros((4, 1))
    for weights_only, name in ((False, "best.keras"), (True, "best.weights.h5")):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        callback = hvd.callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=weights_only)
        callback.filepath = str(tmp_path / name)
        model.fit(x, y, epochs=2, verbose=0, callbacks=[callback])
        assert (tmp_path / name).exists()
