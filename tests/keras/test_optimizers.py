"""Two ranks with half of each batch train the model that one rank trains with the whole of it."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import ringtrain.keras as hvd
from ringtrain.collectives import Collective
from ringtrain.step import set_precision
from tests.keras.training import WAYS, largest_difference, make_batches, make_model, split_batches, train
from tests.world.group import on_ranks

SAMPLES = 8
TOLERANCE = 1e-10
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True},
    "RMSprop": {"learning_rate": 0.01, "momentum": 0.5, "centered": True},
    "Adam": {"learning_rate": 0.01, "amsgrad": True},
    "AdamW": {"learning_rate": 0.01, "weight_decay": 0.01},
    "Adadelta": {"learning_rate": 1.0},
    "Adagrad": {"learning_rate": 0.1},
    "Adamax": {"learning_rate": 0.01},
    "Adafactor": {"learning_rate": 0.01},
    "Nadam": {"learning_rate": 0.01},
    "Ftrl": {"learning_rate": 0.1},
    "Lion": {"learning_rate": 0.01},
    "Lamb": {"learning_rate": 0.01},
    "LossScaleOptimizer": {},
}
ALL_WAYS = ("SGD", "LossScaleOptimizer")
# Muon of Keras 3.12 reads an attribute that variables have on other backends only.
BROKEN_IN_KERAS = {"Muon"}
OPTIONS: dict[str, dict[str, Any]] = {
    "clipping of the reduced gradient": {"global_clipnorm": 0.05},
    "clipping of each": {"clipnorm": 0.02},
    "moving average": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 4},
    "accumulation": {"gradient_accumulation_steps": 2},
    "weight decay": {"weight_decay": 0.1},
}


def make_optimizer(name: str) -> keras.optimizers.Optimizer:
    if name == "LossScaleOptimizer":
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    return getattr(keras.optimizers, name)(**OPTIMIZERS[name])


def train_alone(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """What one rank with the whole batches trains. (Traced after a distributed one, else it would be noticed.)"""
    alone = make_model()
    train("loop", alone, optimizer, make_batches(SAMPLES))
    return alone


def train_distributed(way: str, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = make_model()
    train(way, model, hvd.DistributedOptimizer(optimizer), split_batches(make_batches(SAMPLES)))
    return model


def check_ways(name: str, ways: tuple[str, ...]) -> None:
    set_precision("float64")
    models = [train_distributed(way, make_optimizer(name)) for way in ways]
    alone = train_alone(make_optimizer(name))
    differences = {way: largest_difference(model, alone) for way, model in zip(ways, models, strict=True)}
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - set(ALL_WAYS)))
@on_ranks(2)
def test_two_ranks_equal_one_in_fit(collective: Collective, name: str) -> None:
    check_ways(name, ("fit",))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - set(ALL_WAYS)))
@on_ranks(2)
def test_two_ranks_equal_one_in_eager_fit_and_in_a_loop(collective: Collective, name: str) -> None:
    check_ways(name, ("eager fit", "loop"))


@pytest.mark.parametrize("name", ALL_WAYS)
@on_ranks(2)
def test_two_ranks_equal_one_in_every_way_of_training(collective: Collective, name: str) -> None:
    check_ways(name, WAYS)


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(2)
def test_two_ranks_equal_one_with(collective: Collective, options: str) -> None:
    set_precision("float64")
    distributed = train_distributed("fit", keras.optimizers.Adam(0.05, **OPTIONS[options]))
    alone = make_model()
    train("fit", alone, keras.optimizers.Adam(0.05, **OPTIONS[options]), make_batches(SAMPLES))
    assert largest_difference(distributed, alone) < TOLERANCE


@on_ranks(2)
def test_an_exclusion_from_weight_decay_survives(collective: Collective) -> None:
    set_precision("float64")

    def create() -> keras.optimizers.Optimizer:
        optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    distributed = train_distributed("loop", create())
    assert largest_difference(distributed, train_alone(create())) < TOLERANCE


@on_ranks(2)
def test_the_odd_ones_fail_in_plain_keras_too(collective: Collective) -> None:
    train_distributed("loop", keras.optimizers.SGD())
    for name in BROKEN_IN_KERAS:
        with pytest.raises(AttributeError, match="path"):
            train_alone(getattr(keras.optimizers, name)())


def test_every_optimizer_of_keras_is_tried() -> None:
    shipped = {
        name
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, keras.optimizers.Optimizer)
    }
    assert shipped - {"Optimizer"} == set(OPTIMIZERS) | BROKEN_IN_KERAS
