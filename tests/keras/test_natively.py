"""``fit`` may sum natively, as the runner does: the same weights as by Horovod, and a rank that waits says so."""

import contextlib
import functools
import io
import os
import tempfile
import time
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain.keras as hvd
from ringtrain.collectives import Collective
from ringtrain.collectives.native.backend import Native
from ringtrain.errors import UsageError
from ringtrain.keras import collective as of_keras
from ringtrain.keras import guards
from ringtrain.step.train_step import set_precision
from tests.keras.test_guards import StopOn
from tests.keras.training import WAYS, dataset, largest_difference, make_batches, make_model, split_batches, train
from tests.world.group import on_ranks

SAMPLES = 7


@functools.cache
def train_by(backend: str, way: str, steps_per_execution: int = 1) -> keras.Model:
    """Train a model, once in each process."""
    of_keras.choose_backend(backend)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01, clipnorm=1.0), op=hvd.Sum)
    train(way, model, optimizer, split_batches(make_batches(SAMPLES), (5, 2)), steps_per_execution=steps_per_execution)
    assert optimizer.exchange.sums_natively == (backend == "auto" and way == "fit")
    return model


@pytest.mark.parametrize("way", [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])])
@on_ranks(2)
def test_weights_have_the_same_bits_by_either_backend(collective: Collective, way: str) -> None:
    """Of two ranks there is one sum."""
    assert largest_difference(train_by("auto", way), train_by("horovod", way)) == 0.0


@on_ranks(2)
def test_many_steps_in_a_call_train_the_same_bits(collective: Collective) -> None:
    """The last call has fewer of them."""
    model, of_horovod = (train_by(backend, "fit", 3) for backend in ("auto", "horovod"))
    assert largest_difference(model, of_horovod) == largest_difference(model, train_by("auto", "fit")) == 0.0


@on_ranks(3)
def test_three_ranks_have_the_average_by_either_backend(collective: Collective) -> None:
    """Of float64: a third is no number of float32."""
    set_precision("float64")
    batches = make_batches(6)
    models = []
    for backend in ("auto", "horovod"):
        of_keras.choose_backend(backend)
        models.append(make_model())
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), gradient_predivide_factor=1.5)
        train("fit", models[-1], optimizer, split_batches(batches))
        assert optimizer.exchange.sums_natively == (backend == "auto")
    if not collective.world.is_rank0:
        return
    alone = make_model()
    train("fit", alone, keras.optimizers.SGD(0.1), batches)
    assert max(largest_difference(model, alone) for model in models) < 1e-10


@on_ranks(2)
def test_a_rank_that_stops_early_contributes_zeros(collective: Collective) -> None:
    of_keras.choose_backend("auto")
    model, batches = make_model(), dataset(make_batches(4))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    with pytest.raises(UsageError, match=r"epoch 1 \(rank 0: 10, rank 1: 3\)"):
        train_on(model, optimizer, batches, [StopOn(1, batch=2)])
    assert optimizer.exchange.sums_natively
    assert not optimizer.exchange.may_sum_natively, "the fit has ended, though it raised"
    train_on(make_model(), hvd.DistributedOptimizer(keras.optimizers.SGD()), batches, [])  # the ranks still sum


def train_on(model: keras.Model, optimizer: Any, batches: Any, callbacks: list[Any]) -> None:
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(batches, epochs=2, verbose=0, callbacks=callbacks)


@on_ranks(2)
def test_a_later_fit_of_unknown_length_uses_horovod(collective: Collective) -> None:
    """With the step that the former has traced, uneven ranks would wait in two places."""
    batches = dataset(make_batches(4))
    model, optimizer = make_model(), hvd.DistributedOptimizer(keras.optimizers.SGD())
    train_on(model, optimizer, batches, [])
    assert optimizer.exchange.sums_natively
    uneven = batches.take(8 - 3 * collective.world.rank).filter(lambda x, y: True)
    with pytest.raises(UsageError, match=r"epoch 1 \(rank 0: 8, rank 1: 5\)"):
        model.fit(uneven, verbose=0)
    assert not optimizer.exchange.sums_natively


class TwoSums(keras.Sequential):
    """Updates its first layer, and then the rest by what the first update has made of the loss."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        for variables in (self.layers[0].trainable_variables, self.layers[1].trainable_variables):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.slow
@on_ranks(2)
def test_a_step_of_two_reductions_is_exact_and_may_stop_early(collective: Collective) -> None:
    models = []
    batches = dataset(split_batches(make_batches(SAMPLES), (5, 2)))
    for backend in ("auto", "horovod"):
        of_keras.choose_backend(backend)
        model = TwoSums(make_model().layers)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum)
        optimizer.build(model.trainable_variables)
        train_on(model, optimizer, batches, [])
        models.append(model)
        assert [one.is_native for one in optimizer.exchange._step.read()] == [backend == "auto"] * 2
    of_keras.choose_backend("auto")
    assert largest_difference(*models) == 0.0
    with pytest.raises(UsageError, match=r"epoch 1 \(rank 0: 10, rank 1: 3\)"):
        train_on(models[0], models[0].optimizer, batches, [StopOn(1, batch=2)])


@on_ranks(2)
def test_horovod_reduces_if_requested_and_in_elastic_training(collective: Collective) -> None:
    of_keras.choose_backend("horovod")
    assert not of_keras.wants_native_sums()
    of_keras.choose_backend("auto")
    assert of_keras.wants_native_sums()
    assert isinstance(of_keras.all_ranks(), Native)
    with mock.patch.dict(os.environ, {"HOROVOD_ELASTIC": "1"}):
        assert not of_keras.wants_native_sums()
    of_keras.choose_backend("auto")


@on_ranks(2)
def test_rank_0_reports_once_why_sums_are_not_native(collective: Collective) -> None:
    of_keras.choose_backend("auto")
    guards.say_once.cache_clear()
    stderr, batches = io.StringIO(), dataset(make_batches(4))
    cores = "rank 0 on cores 0-1 (not pinned: another run holds some of 0)"
    with contextlib.redirect_stderr(stderr), mock.patch.object(of_keras, "_cores", cores):
        for op, data in [(hvd.Adasum, batches), (hvd.Sum, batches.filter(lambda x, y: True))]:
            model, optimizer = make_model(), hvd.DistributedOptimizer(keras.optimizers.SGD(), op=op)
            train_on(model, optimizer, data, [])
            model.fit(data, verbose=0)
            assert not optimizer.exchange.sums_natively
    start = "ringtrain.keras: communication: Horovod over MPI; no sum is native: "
    whys = ["the optimizer has op=hvd.Adasum", "the steps of an epoch are unknown"]
    said = [line for line in stderr.getvalue().splitlines() if "communication" in line]
    assert said == [f"{start}{why}; {cores}" for why in whys if collective.world.is_rank0]


class TwoOptimizers(keras.Sequential):
    """Updates each of its layers by an optimizer of its own, as a GAN does; that of the model comes last."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        for layer, optimizer in zip(self.layers, (self.other, self.optimizer), strict=True):
            optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return {"loss": loss}


@on_ranks(2)
def test_a_rank_that_ends_early_joins_sums_of_all_optimizers(collective: Collective) -> None:
    model = TwoOptimizers(make_model().layers)
    model.other = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    uneven = dataset(make_batches(4)).take(8 - 3 * collective.world.rank).filter(lambda x, y: True)
    with pytest.raises(UsageError, match=r"epoch 1 \(rank 0: 8, rank 1: 5\)"):
        train_on(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), uneven, [])


def test_another_backend_is_refused() -> None:
    with pytest.raises(UsageError, match="backend is 'nccl'"):
        hvd.init(backend="nccl")  # type: ignore[arg-type]


@on_ranks(2)
def test_a_rank_that_waits_for_another_reports_the_stall(collective: Collective) -> None:
    of_keras.choose_backend("horovod")
    of_keras.choose_backend("auto")  # which have not met
    with mock.patch.object(of_keras, "STALL_SECONDS", 1.0):
        ranks = of_keras.all_ranks()
    of_keras.choose_backend("horovod")
    of_keras.choose_backend("auto")
    if collective.world.rank == 1:
        time.sleep(1.6)
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            total = ranks.sum_in_order([tf.constant([1.0])], name="stalled").tensors[0]
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        file.seek(0)
        said = file.read().decode()
    np.testing.assert_array_equal(total, [2.0])
    expected = "local rank 0 has waited 1 s in a sum for local rank 1, which lives and has not come to it"
    assert (expected in said) == (collective.world.rank == 0)
