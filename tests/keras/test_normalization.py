"""SyncBatchNormalization on the ranks' parts of a batch is BatchNormalization on the whole of it."""

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain.keras as hvd
from ringtrain.collectives import Collective
from ringtrain.collectives.context import use_collective
from ringtrain.errors import UsageError
from ringtrain.step.train_step import set_precision
from tests.keras.training import WAYS, largest_difference, make_batches, make_model, split_batches, train
from tests.world.group import BY_MPI, on_ranks
from tests.world.training import (
    NUM_CLASSES,
    assert_close,
    assert_same_bits_on_all_ranks,
    batches_of,
    create_step,
    dense_samples,
    train_plainly,
)
from tests.world.training import train as run_train_step

TOLERANCE = 1e-10
SAMPLES = 7
SHARES = {"uneven": {2: (5, 2), 3: (4, 1, 2)}, "one empty": {2: (7, 0), 3: (4, 0, 3)}}


def normalise(layer: keras.layers.Layer, x: np.ndarray, part: slice, mask: np.ndarray | None) -> dict[str, Any]:
    """Outputs of a part of x, and the gradients of a loss whose terms are those of the whole."""
    factors = np.random.default_rng(5).normal(size=x.shape)
    inputs = tf.Variable(x[part])
    with tf.GradientTape() as tape:
        options = {} if mask is None else {"mask": tf.constant(mask[part])}
        outputs = layer(inputs, training=True, **options)
        loss = tf.reduce_sum(factors[part] * tf.sin(outputs))
    of_inputs, of_gamma, of_beta = tape.gradient(loss, [inputs, layer.gamma, layer.beta])
    return {"outputs": outputs, "of_inputs": of_inputs, "of_gamma": of_gamma, "of_beta": of_beta}


@pytest.mark.parametrize(
    ("case", "share"),
    [("dense", "uneven"), ("images", "one empty"), ("channels first", "uneven"), ("masked", "one empty")],
)
@on_ranks(2, BY_MPI)
def test_values_and_gradients_are_those_of_the_whole_batch(collective: Collective, case: str, share: str) -> None:
    set_precision("float64")
    shape = {"dense": (5,), "images": (4, 3, 5), "channels first": (5, 4, 3), "masked": (4, 5)}[case]
    options: dict[str, Any] = {"axis": 1 if case == "channels first" else -1, "momentum": 0.8}
    x = np.random.default_rng(1).normal(1000, 2, size=(SAMPLES, *shape))
    mask = np.random.default_rng(2).random((SAMPLES, 4)) < 0.7 if case == "masked" else None
    counts = SHARES[share][collective.world.size]
    begin = sum(counts[: collective.world.rank])
    part = slice(begin, begin + counts[collective.world.rank])
    layer, plain = hvd.SyncBatchNormalization(**options), keras.layers.BatchNormalization(**options)
    # Where Horovod is started nobody needs to say who the ranks are.
    with use_collective(collective) if collective.is_ordered else contextlib.nullcontext():
        mine, whole = normalise(layer, x, part, mask), normalise(plain, x, slice(None), mask)
    # Keras divides by (count + 1e-7) where there is a mask.
    tolerance = 1e-4 if case == "masked" else TOLERANCE
    for name in ("outputs", "of_inputs"):
        assert_close(mine[name], whole[name][part], name, tolerance)
    for name in ("of_gamma", "of_beta"):
        [total] = collective.all_reduce([mine[name]], name=name)
        assert_close(total, whole[name], name, tolerance)
    assert_close(layer.moving_mean.numpy(), plain.moving_mean.numpy(), "mean", tolerance)
    assert_close(layer.moving_variance.numpy(), plain.moving_variance.numpy(), "variance", tolerance)


@on_ranks(2)
def test_masked_values_may_be_anything(collective: Collective) -> None:
    set_precision("float64")
    layer, mask = hvd.SyncBatchNormalization(), np.array([[True, False], [True, True]])
    clean = np.random.default_rng(collective.world.rank).normal(size=(2, 2, 3))
    dirty = np.where(mask[..., np.newaxis], clean, np.nan)
    layer(tf.zeros([1, 1, 3]))
    right, found = (layer(tf.constant(x), training=True, mask=tf.constant(mask)).numpy() for x in (clean, dirty))
    np.testing.assert_array_equal(found[mask], right[mask])
    assert np.isfinite(layer.moving_mean.numpy()).all()
    assert np.isfinite(layer.moving_variance.numpy()).all()


@on_ranks(2)
def test_an_empty_global_batch_keeps_the_statistics(collective: Collective) -> None:
    layer = hvd.SyncBatchNormalization()
    layer.build((None, 3))
    layer.moving_mean.assign([1.0, 2.0, 3.0])
    layer(tf.zeros([0, 3]), training=True)
    np.testing.assert_array_equal(layer.moving_mean.numpy(), [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(layer.moving_variance.numpy(), [1.0, 1.0, 1.0])


def check_ways(collective: Collective, ways: tuple[str, ...]) -> None:
    """A sum of losses, reduced by Sum: the objective of the whole batch whatever the ranks' parts."""
    set_precision("float64")
    whole = make_batches(SAMPLES)
    models = []
    for way in ways:
        models.append(make_model(hvd.SyncBatchNormalization))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.005, momentum=0.9), op=hvd.Sum)
        train(way, models[-1], optimizer, split_batches(whole, (5, 2)), loss=sum_of_squares)
        assert_same_bits_on_all_ranks(models[-1].variables, collective)
    if not collective.world.is_rank0:
        return
    alone = make_model(keras.layers.BatchNormalization)
    train("loop", alone, keras.optimizers.SGD(0.005, momentum=0.9), whole, loss=sum_of_squares)
    for model in models:
        assert largest_difference(model, alone) < TOLERANCE


def sum_of_squares(y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(y - outputs))


@on_ranks(2)
def test_uneven_halves_with_layers_of_other_names_equal_one_rank_in_every_way(collective: Collective) -> None:
    if collective.world.rank == 0:  # Keras numbers layers and optimizers as they are created
        make_model(hvd.SyncBatchNormalization)
        keras.optimizers.SGD()
    check_ways(collective, WAYS)


def sync_model() -> keras.Model:
    return keras.Sequential(
        [keras.Input((5,)), hvd.SyncBatchNormalization(momentum=0.75), keras.layers.Dense(NUM_CLASSES)]
    )


def plain_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential([keras.Input((5,)), layers.BatchNormalization(momentum=0.75), layers.Dense(NUM_CLASSES)])


@on_ranks(2, BY_MPI)
def test_the_training_step_is_exact_with_ranks_without_samples(collective: Collective) -> None:
    source, steps = dense_samples(45), 7  # the fifth step has one sample: all other ranks have none
    batches = batches_of(source, collective, global_batch_size=11, steps=steps)
    with use_collective(collective):
        step = create_step(collective, sync_model, lambda: keras.optimizers.Adam(0.01), batches.element_spec)
    reference, optimizer = plain_model(), keras.optimizers.Adam(0.01)
    reference.set_weights(step.model.get_weights())
    with use_collective(collective):
        reports = run_train_step(step, batches)
    expected = list(train_plainly(reference, optimizer, source, global_batch_size=11, steps=steps))
    assert [report.samples for report in reports] == [11, 11, 11, 11, 1, 11, 11]
    assert_same_bits_on_all_ranks(step.variables, collective)
    for mine, right in zip(step.model.variables, reference.variables, strict=True):
        assert_close(mine.numpy(), right.numpy(), mine.path, TOLERANCE)
    assert_close([report.loss for report in reports], [loss for loss, _, _ in expected], "loss", TOLERANCE)


@on_ranks(2, BY_MPI)
def test_ranks_run_as_many_micro_batches_with_it(collective: Collective) -> None:
    """Five samples make three micro-batches of at most two, four samples four of one: ranks must not part ways."""
    batches = batches_of(dense_samples(19), collective, global_batch_size=9, steps=3)
    with use_collective(collective):
        step = create_step(collective, sync_model, keras.optimizers.SGD, batches.element_spec, accumulate=4)
        reports = run_train_step(step, batches)
    assert [report.samples for report in reports] == [9, 9, 1]
    assert all(np.isfinite(report.loss) for report in reports)
    assert_same_bits_on_all_ranks(step.variables, collective)


def test_one_process_equals_batch_normalization(tmp_path: Any) -> None:
    x = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
    layer, plain = hvd.SyncBatchNormalization(fused=False), keras.layers.BatchNormalization()
    np.testing.assert_allclose(layer(x, training=True), plain(x, training=True), atol=1e-6)
    model = keras.Sequential([keras.Input((3,)), layer])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0]) is hvd.SyncBatchNormalization
    np.testing.assert_array_equal(loaded(x), model(x))


def test_a_fused_one_is_refused() -> None:
    with pytest.raises(UsageError, match="fused=True"):
        hvd.SyncBatchNormalization(fused=True)
