"""What would train in silence, or wait for ever, ends in a message that says what to do."""

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain.keras as hvd
from ringtrain.collectives import Collective, all_gather_object
from ringtrain.collectives.gradients import GradientReduction
from ringtrain.data.tf_data import without_tuner
from ringtrain.errors import ReplicasDifferError, UsageError
from ringtrain.keras import collective as of_keras
from ringtrain.keras import guards, hooks
from tests.keras.training import FEATURES, dataset, make_batches, make_model, split_batches, train
from tests.world.group import on_ranks

DISTRIBUTE = hvd.DistributedOptimizer


def fit(model: keras.Model, optimizer: Any, batches: Any, **options: Any) -> keras.callbacks.History:
    model.compile(optimizer, "mean_squared_error")
    return model.fit(batches if isinstance(batches, tf.data.Dataset) else dataset(batches), verbose=0, **options)


@on_ranks(2)
def test_misuse_is_named(collective: Collective) -> None:
    layers = [keras.layers.Dense(1)]
    for misuse, words in [
        (lambda: DISTRIBUTE("adam"), ["'adam'", "keras.optimizers.get('adam')"]),
        (lambda: DISTRIBUTE(DISTRIBUTE(keras.optimizers.SGD())), ["'SGD", "distributed already"]),
        (lambda: DISTRIBUTE(keras.optimizers.SGD(), compression="fp16"), ["'fp16'", "hvd.Compression.fp16"]),
        (lambda: DISTRIBUTE(keras.optimizers.SGD(), op="mean"), ["'mean'", "hvd.Average"]),
        (lambda: DISTRIBUTE(keras.optimizers.SGD(), groups=-1), ["groups=-1", "whole number"]),
        (lambda: DISTRIBUTE(keras.optimizers.SGD(), backward_passes_per_step=0), ["backward_passes_per_step=0"]),
        (
            lambda: DISTRIBUTE(keras.optimizers.SGD(), op=hvd.Sum, gradient_predivide_factor=2.0),
            ["gradient_predivide_factor=2.0", "op=hvd.Average"],
        ),
        (
            lambda: DISTRIBUTE(keras.optimizers.SGD(gradient_accumulation_steps=2), backward_passes_per_step=2),
            ["gradient_accumulation_steps=2", "Leave one"],
        ),
        (
            lambda: hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=["dense"]),
            ["'dense'", "no Keras layer"],
        ),
        (lambda: hvd.DistributedGradientTape(layers), ["tf.GradientTape"]),
        (
            lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[layers]),
            ["local_variables", "no variable"],
        ),
        (
            lambda: hvd.callbacks.LearningRateScheduleCallback(None, 0.1),  # type: ignore[arg-type]
            ["initial_lr=None"],
        ),
        (lambda: hvd.callbacks.BestModelCheckpoint().on_train_begin(), ["filepath"]),
        (lambda: hvd.load_model("model.keras", legacy_opts=True), ["legacy_opts=True"]),
    ]:
        with pytest.raises(UsageError) as error:
            misuse()
        for word in words:
            assert word.lower() in str(error.value).lower(), (word, str(error.value))


@on_ranks(2)
def test_an_undistributed_optimizer_is_named_at_its_first_step(collective: Collective) -> None:
    hvd.init()
    for way in ("fit", "loop"):
        GradientReduction.calls = 0
        with pytest.raises(UsageError, match=r"'named' \(SGD\) is not distributed.*hvd.DistributedOptimizer"):
            train(way, make_model(), keras.optimizers.SGD(name="named"), make_batches(4))


@on_ranks(2)
def test_a_second_compile_without_the_wrapper_is_named(collective: Collective) -> None:
    """Fine-tuning in two phases: the head first, then all of it."""
    model, batches = make_model(), make_batches(4)
    model.layers[0].trainable = False
    fit(model, DISTRIBUTE(keras.optimizers.SGD()), batches)
    model.layers[0].trainable = True
    with pytest.raises(UsageError, match=r"'forgotten' \(SGD\) .*hvd.DistributedOptimizer"):
        fit(model, keras.optimizers.SGD(name="forgotten"), batches)
    fit(model, DISTRIBUTE(keras.optimizers.SGD(1e-3)), batches)


@on_ranks(2)
def test_different_models_are_refused_before_the_first_step(collective: Collective) -> None:
    sgd, is_odd = keras.optimizers.SGD, collective.world.rank == 1
    half, relu, full = (
        keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, **settings)])
        for settings in ({"dtype": "mixed_bfloat16"}, {"activation": "relu"}, {})
    )
    for model, optimizer, words in [
        (
            full,
            keras.optimizers.Adam(0.1) if is_odd else sgd(0.1),
            r"different optimizers \(rank 0: SGD, rank 1: Adam\)",
        ),
        (full, sgd(0.1, momentum=0.9 * is_odd), r"values of momentum in the optimizer \(rank 0: 0\.0, rank 1: 0\.9\)"),
        (full, sgd(0.1, clipnorm=1.0 if is_odd else None), r"values of clipnorm .*\(rank 0: null, rank 1: 1\.0\)"),
        (half if is_odd else full, sgd(0.1), r"different dtype policies \(rank 0: .*float32.*, rank 1: .*bfloat16"),
        (
            relu if is_odd else full,
            sgd(0.1),
            r"settings of layers \(rank 0: Dense \(layer 1\): activation=linear, rank 1: .*=relu",
        ),
    ]:
        with pytest.raises(UsageError, match=words):
            fit(model, DISTRIBUTE(optimizer), make_batches(2))


@on_ranks(2)
def test_different_learning_rates_at_start_give_a_warning(collective: Collective) -> None:
    """It may be meant so, as when one rank has loaded a saved model."""
    optimizer = DISTRIBUTE(keras.optimizers.SGD(0.1 + collective.world.rank))
    with mock.patch.object(of_keras.log, "warning") as warning:
        fit(make_model(), optimizer, make_batches(2), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    if collective.world.is_rank0:
        [call] = warning.call_args_list
        assert call.args[1] == "rank 0: 0.1, rank 1: 1.1"
    assert float(optimizer.learning_rate) == pytest.approx(0.1)


@on_ranks(2)
def test_learning_rates_that_diverge_name_callbacks_as_the_cause(collective: Collective) -> None:
    class Halve(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.05

    with pytest.raises(ReplicasDifferError, match=r"different learning rates after epoch 1 .*ReduceLROnPlateau"):
        fit(
            make_model(),
            DISTRIBUTE(keras.optimizers.SGD(0.1)),
            make_batches(2),
            callbacks=[Halve()] if collective.world.rank == 1 else [],
        )


class TapedModel(keras.Sequential):
    """Reduces by a tape in a training step of its own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@on_ranks(2)
def test_drift_under_a_distributed_tape_is_named_after_the_epoch(collective: Collective) -> None:
    hvd.init()
    model = TapedModel(make_model().layers)
    batches = make_batches(4)
    for _ in range(2):
        fit(model, keras.optimizers.SGD(1e-3), batches, epochs=2)
    model.fit(dataset(batches), verbose=0)  # the same traced step
    kernel = model.layers[1].kernel
    kernel.assign(kernel + collective.world.rank)
    with pytest.raises(ReplicasDifferError, match=r"after epoch 1: rank 0 on \S+ and rank 1 .*/kernel"):
        model.fit(dataset(batches), verbose=0)


@on_ranks(2)
def test_ranks_may_train_separate_models_of_local_layers(collective: Collective) -> None:
    hvd.init()
    if collective.world.rank == 0:
        model = make_model()
        own = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(), local_layers=model.layers, scale_local_gradients=False
        )
        fit(model, own, make_batches(4))


@on_ranks(2)
def test_different_numbers_of_batches_are_named_before_training(collective: Collective) -> None:
    model = make_model()
    before = model.get_weights()
    optimizer = DISTRIBUTE(keras.optimizers.SGD())
    steps = 5 + collective.world.rank
    with pytest.raises(UsageError, match=r"rank 0: 5, rank 1: 6.*steps_per_epoch"):
        fit(model, optimizer, make_batches(4, steps=steps))
    with pytest.raises(UsageError, match=r"epochs \(rank 0: 1, rank 1: 2\)"):
        fit(model, optimizer, make_batches(4), epochs=collective.world.rank + 1)
    for mine, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, old)


@on_ranks(2)
def test_unequal_unknown_batch_counts_are_named_after_the_epoch(collective: Collective) -> None:
    steps = 6 - collective.world.rank
    endless = dataset(make_batches(4, steps=steps)).filter(lambda x, y: True)  # nobody knows how many are left
    with pytest.raises(UsageError, match=r"batches in epoch 1 \(rank 0: 6, rank 1: 5\)"):
        fit(make_model(), DISTRIBUTE(keras.optimizers.SGD()), endless)


@pytest.mark.parametrize("is_eager", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks(2)
def test_ranks_that_end_early_in_a_later_fit_are_named_as_well(collective: Collective, is_eager: bool) -> None:
    """Horovod's own join ends too early the second time; one gradient is sparse."""
    x, y = np.arange(8).reshape(8, 1) % 5, np.ones((8, 1))
    layers = keras.layers
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((1,)), layers.Embedding(5, 2), layers.Flatten(), layers.Dense(1)])
    model.compile(DISTRIBUTE(keras.optimizers.SGD()), "mse", run_eagerly=is_eager)
    whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(1).filter(lambda x, y: True)
    model.fit(whole, verbose=0, epochs=2)
    for first, second in ((8, 3), (4, 6), (7, 6)):
        counts = rf"\(rank 0: {first}, rank 1: {second}\)"
        with pytest.raises(UsageError, match=f"batches in epoch 1 {counts}"):
            model.fit(whole.take((first, second)[collective.world.rank]), verbose=0)


@pytest.mark.parametrize("knows_steps", [True, False])
@on_ranks(2)
def test_a_rank_without_any_batch_is_named(collective: Collective, knows_steps: bool) -> None:
    data = dataset(make_batches(4, steps=6)).take(6 if collective.world.rank == 0 else 0)
    data = data if knows_steps else data.filter(lambda x, y: True)
    when = "an epoch" if knows_steps else "epoch 1"
    with pytest.raises(UsageError, match=rf"batches in {when} \(rank 0: 6, rank 1: 0\)"):
        fit(make_model(), DISTRIBUTE(keras.optimizers.SGD()), data)


@on_ranks(2)
def test_eager_ranks_without_any_batch_report_it(collective: Collective) -> None:
    """In eager mode nothing is traced of a step that is not there; here no rank waits, since none has a batch."""
    nothing = dataset(make_batches(4)).take(0).filter(lambda x, y: True)
    model = make_model()
    model.compile(DISTRIBUTE(keras.optimizers.SGD()), "mse", run_eagerly=True)
    with pytest.raises(UsageError, match=rf"^rank {collective.world.rank} had no batch in this epoch.*drop_remainder"):
        model.fit(nothing, verbose=0)


@on_ranks(2)
def test_weights_of_other_shapes_are_named_before_training(collective: Collective) -> None:
    """Those of data whose features are others on each rank; a model that is built in its first step fails there."""
    x, y = np.ones((8, 3 + collective.world.rank)), np.ones((8, 1))
    others = r"^rank 0 has 2 variables to train, and rank 1 has 2; .* \w+ \[3, 1\] and \w+ \[4, 1\]\. .*of one shape"
    for layers, error, words in [
        ([keras.Input(x.shape[1:])], UsageError, others),
        ([], tf.errors.AbortedError, "the ranks are at different places of the program: they sum different things"),
    ]:
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile(DISTRIBUTE(keras.optimizers.SGD()), "mse")
        with pytest.raises(error, match=words):
            model.fit(x, y, batch_size=2, verbose=0)
    for backend in ("horovod", "auto"):  # the ranks join anew
        of_keras.choose_backend(backend)


@on_ranks(2)
def test_features_of_different_types_train_equally(collective: Collective) -> None:
    """Keras casts them to the type in which a model computes."""
    x, y = make_batches(8, steps=1)[0]
    x = x.astype(np.float32).astype([np.float32, np.float64][collective.world.rank])
    model = make_model()
    fit(model, DISTRIBUTE(keras.optimizers.SGD()), tf.data.Dataset.from_tensor_slices((x, y)).batch(2))


@on_ranks(2)
def test_a_validation_split_with_other_batch_counts_is_named(collective: Collective) -> None:
    rank, (x, y) = collective.world.rank, make_batches(48, steps=1)[0]
    model, average = make_model(), hvd.callbacks.MetricAverageCallback()
    model.compile(DISTRIBUTE(keras.optimizers.SGD()), "mse")
    options = {"batch_size": 5, "validation_split": 0.25, "verbose": 0, "callbacks": [average]}
    size = 40 + 7 * rank
    with pytest.raises(UsageError, match=r"batches in an epoch \(rank 0: 6, rank 1: 7\)"):
        model.fit(x[:size], y[:size], **options)
    size = 40 + rank  # 30 samples each to train on, in 6 batches; 10 and 11 to validate by, in 2 and 3
    history = model.fit(x[:size], y[:size], **options).history
    values = all_gather_object(collective, history["val_loss"], name="values")
    assert values[0] == values[1]


@on_ranks(2)
def test_generators_of_one_length_train(collective: Collective) -> None:
    batches = make_batches(4)
    model = make_model()
    fit(model, DISTRIBUTE(keras.optimizers.SGD()), dataset(batches).filter(lambda x, y: True), epochs=2)
    alone = make_model()
    fit(alone, keras.optimizers.SGD(), dataset(batches), epochs=2)
    for mine, right in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-6)


class StopOn(keras.callbacks.Callback):
    """Stops the training of one rank, after a batch or after an epoch."""

    def __init__(self, rank: int, *, batch: int = -1, epoch: int = -1) -> None:
        super().__init__()
        self._is_mine, self._batch, self._epoch = hvd.rank() == rank, batch, epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training |= self._is_mine and batch == self._batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training |= self._is_mine and epoch == self._epoch


@on_ranks(2)
def test_a_rank_that_stops_alone_after_an_epoch_is_named(collective: Collective) -> None:
    batches = dataset(make_batches(4, steps=4))
    optimizer = DISTRIBUTE(keras.optimizers.SGD(0.01))
    with pytest.raises(UsageError, match=r"^rank 1 stopped after 2 epochs .*MetricAverageCallback"):
        fit(make_model(), optimizer, batches, epochs=4, callbacks=[StopOn(1, epoch=1)])


@on_ranks(2)
def test_a_rank_that_stops_mid_epoch_is_named_after_the_epoch(collective: Collective) -> None:
    """The others add zeros of its to their gradients until then, in place of waiting for ever."""
    batches = dataset(make_batches(4, steps=4))
    for groups in (None, 2):
        optimizer = DISTRIBUTE(keras.optimizers.SGD(0.01), groups=groups)
        with pytest.raises(UsageError, match=r"epoch 1 \(rank 0: 2, rank 1: 4\).*MetricAverageCallback"):
            fit(make_model(), optimizer, batches, epochs=2, callbacks=[StopOn(0, batch=1)])


@on_ranks(2)
def test_ranks_that_stop_together_have_trained(collective: Collective) -> None:
    model, batches = make_model(), dataset(make_batches(4, steps=4))
    model.compile(DISTRIBUTE(keras.optimizers.SGD(0.01)), "mse")
    for stop in ({"batch": 1}, {"epoch": 0}):
        history = model.fit(batches, epochs=3, verbose=0, callbacks=[StopOn(hvd.rank(), **stop)])
        assert len(history.epoch) == 1


@on_ranks(2)
def test_replicas_that_drift_are_named_after_the_epoch(collective: Collective) -> None:
    model = make_model()
    kernel = model.layers[1].kernel
    kernel.assign(kernel + collective.world.rank)
    with pytest.raises(ReplicasDifferError, match=r"after epoch 1: .* in \S+/kernel\. .*BroadcastGlobalVariables"):
        fit(model, DISTRIBUTE(keras.optimizers.SGD()), make_batches(4), epochs=2)
    local = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=model.layers[1])
    fit(model, local, split_batches(make_batches(4)), epochs=2)


@contextlib.contextmanager
def captured(log: logging.Logger) -> Iterator[list[str]]:
    """The lines of a log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


@pytest.mark.slow
@on_ranks(3)
def test_the_drifted_one_of_three_replicas_is_named(collective: Collective) -> None:
    model = make_model()
    bias = model.layers[1].bias
    bias.assign(bias + (collective.world.rank == 1))
    with pytest.raises(ReplicasDifferError, match=r"epoch 1: rank 1 on \S+ differs from ranks 0, 2 in \S+/bias\."):
        fit(model, DISTRIBUTE(keras.optimizers.SGD()), make_batches(4))


@on_ranks(3)
def test_ranks_that_train_on_the_same_samples_are_named(collective: Collective) -> None:
    """Though each drops out other units."""
    batches, rank = make_batches(6), collective.world.rank
    own = split_batches(batches)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dropout(0.5, seed=rank), *make_model().layers])
    model.compile(DISTRIBUTE(keras.optimizers.SGD()), "mse")
    for data, is_named in ((own, False), (batches[:1] * 10, False), (own if rank == 1 else batches, True)):
        guards.warn_of_same.cache_clear()
        with captured(of_keras.log) as lines:
            model.fit(dataset(data), epochs=2, verbose=0, callbacks=[Evaluate()])
        said = [line for line in lines if "the very same data" in line]
        assert len(said) == (is_named and rank == 0), lines
    if said:
        assert said[0].startswith("ringtrain.keras: ranks 0, 2 had the very same data")


def test_batches_of_any_type_and_size_are_noted() -> None:
    half = [tf.constant([1.0, 2.0], dtype) for dtype in (tf.float16, tf.bfloat16)]
    batch = (tf.zeros([0, 3]), *half, tf.zeros([2, 0], tf.complex64), tf.constant("text"))
    assert guards._hash(batch) == guards._hash(batch)
    assert guards._hash(batch) != guards._hash((*batch[:-1], tf.constant("texts")))


class Evaluate(keras.callbacks.Callback):
    """Has the model evaluated on what all ranks have, before an epoch's first step."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.evaluate(dataset(make_batches(6)), verbose=0)


class InOrder(keras.utils.PyDataset):
    """Batches by number."""

    def __init__(self, batches: Any) -> None:
        super().__init__()
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> Any:
        return self._batches[number]


SLOW_WAYS = ("arrays", "PyDataset", "step of its own", "eager")


@pytest.mark.parametrize(
    "way", ["generator", "steps at once", *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW_WAYS)]
)
@on_ranks(2)
def test_the_first_batches_are_recorded_in_all_ways_of_training(collective: Collective, way: str) -> None:
    """The second batch alone is each rank's own."""
    rank, batches = collective.world.rank, make_batches(4)
    batches = [batches[0], batches[1 + rank], batches[3], batches[3]]
    x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    data = {
        "arrays": {"x": x, "y": y, "batch_size": 4, "shuffle": False},
        "PyDataset": {"x": InOrder(batches), "shuffle": False},
        "generator": {"x": (batch for batch in batches), "steps_per_epoch": 4},
    }
    model = OwnStep(make_model().layers) if way == "step of its own" else make_model()
    options = {"run_eagerly": way == "eager", "steps_per_execution": 2 if way == "steps at once" else 1}
    model.compile(DISTRIBUTE(keras.optimizers.SGD()), "mse", **options)
    model.fit(**data.get(way, {"x": dataset(batches)}), epochs=2 if way == "steps at once" else 1, verbose=0)
    first, second = all_gather_object(collective, guards.first_batches().hashes, name="hashes")
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True, True][: len(first)]
    assert len({*first}) == 3


class OwnStep(keras.Sequential):
    """A model whose step may sum over the ranks."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


@on_ranks(2)
def test_a_step_that_xla_cannot_compile_runs_and_warns_once(collective: Collective) -> None:
    with captured(of_keras.log) as mine:
        for _ in range(2):
            model, batches = OwnStep(make_model().layers), split_batches(make_batches(4))
            train("fit", model, DISTRIBUTE(keras.optimizers.SGD()), batches, jit_compile=True)
            assert model.jit_compile
        model.train_on_batch(*batches[0])
        model.predict(np.zeros((2, FEATURES)), verbose=0)
    lines = all_gather_object(collective, mine, name="lines")
    assert [len(line) for line in lines] == [1, 0]
    assert "without XLA: OwnStep has its own train_step" in lines[0][0]


@on_ranks(1)
def test_the_end_of_an_epoch_waits_for_no_tuner_on_one_core(collective: Collective) -> None:
    hvd.init()
    seen = []

    def note(dataset: Any, state: bytes) -> Any:
        seen.append(without_tuner(dataset, state).options().autotune.enabled)
        return dataset

    with (
        mock.patch("os.sched_getaffinity", return_value={0}),
        mock.patch("ringtrain.keras.hooks.without_tuner", side_effect=note),
    ):
        fit(make_model(), keras.optimizers.SGD(), split_batches(make_batches(2)), epochs=2)
    assert seen
    assert not any(seen)


class InPython(keras.layers.Layer):
    """XLA lacks this operation."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(lambda array: array, [x], x.dtype, stateful=False), x.shape)


@pytest.mark.slow
@on_ranks(2)
def test_an_operation_that_xla_has_not_is_named(collective: Collective) -> None:
    model = keras.Sequential([keras.Input((FEATURES,)), InPython(), *make_model().layers])
    before = model.get_weights()
    message = r"XLA cannot compile PyFuncStateless \(node \S*in_python\S*\)\. .*jit_compile=False"
    with pytest.raises(UsageError, match=message):
        train("fit", model, DISTRIBUTE(keras.optimizers.SGD(0.1)), split_batches(make_batches(4)), jit_compile=True)
    for weight, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, other)


@on_ranks(2)
def test_xla_compiles_all_of_a_step_but_its_sums_and_its_update(collective: Collective) -> None:
    weights = []
    for jit_compile in (False, True):
        model, batches = make_model(), split_batches(make_batches(4))
        plain = hooks.CompiledStep._compute
        with mock.patch.object(hooks.CompiledStep, "_compute", autospec=True, side_effect=plain) as compute:
            train("fit", model, DISTRIBUTE(keras.optimizers.Adam(0.1)), batches, jit_compile=jit_compile)
        assert bool(compute.call_count) == jit_compile
        weights.append(model.get_weights())
    model.evaluate(*batches[0], verbose=0)
    for plain, ours in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)
    digests = [hashlib.sha256(np.concatenate([w.ravel() for w in weights[1]]).tobytes()).hexdigest()]
    assert len(set(map(tuple, all_gather_object(collective, digests, name="weights")))) == 1


def overflowing_model() -> keras.Model:
    """A model of float16 whose output is its input's sum; large inputs overflow in it."""
    return keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(4, kernel_initializer="ones", activation="relu"),
            keras.layers.Dense(1, kernel_initializer="ones", dtype="mixed_float16"),
        ]
    )


@on_ranks(2)
def test_an_overflow_on_one_rank_is_skipped_by_all(collective: Collective) -> None:
    rank = collective.world.rank
    keras.config.set_dtype_policy("mixed_float16")
    fine, too_large = np.full((2, 2), 0.01, "float16"), np.full((2, 2), 60000.0, "float16")
    y = np.zeros((2, 1), "float16")
    for eager, passes in ((True, 1), (False, 2)):
        model = overflowing_model()
        optimizer = DISTRIBUTE(keras.optimizers.SGD(1e-3), backward_passes_per_step=passes)
        model.compile(optimizer, "mse", run_eagerly=eager)
        assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
        before = [weight.copy() for weight in model.get_weights()]
        for _ in range(passes):
            model.train_on_batch(too_large if rank == 1 else fine, y)
        scale = float(model.optimizer.dynamic_scale.numpy())
        assert scale == 2.0**14
        for mine, old in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(mine, old)
        for _ in range(20 * passes):  # until the scale has come down to where float16 holds the gradients
            model.train_on_batch(fine, y)
        scales = all_gather_object(collective, float(model.optimizer.dynamic_scale.numpy()), name="scales")
        assert scales[0] == scales[1]
        digests = all_gather_object(collective, [w.tobytes().hex() for w in model.get_weights()], name="weights")
        assert digests[0] == digests[1]
        assert any((mine != old).any() for mine, old in zip(model.get_weights(), before, strict=True))


def test_init_comes_first() -> None:
    layer = keras.layers.Dense(1)
    for misuse in (
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD()),
        lambda: hvd.DistributedGradientTape(tf.GradientTape()),
        lambda: hvd.callbacks.LearningRateWarmupCallback(0.1),
        lambda: hvd.broadcast_variables(layer.variables, root_rank=0),
    ):
        with pytest.raises(UsageError, match=r"not initialized.*ringtrain.keras.init\(\)"):
            misuse()


def test_a_layer_that_needs_all_ranks_asks_for_init_first(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    for name, value in zip(names, "0202", strict=True):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(UsageError, match=r"'sync' needs to know the ranks.*ringtrain.keras.init\(\)"):
        hvd.SyncBatchNormalization(name="sync")(tf.zeros([2, 3]), training=True)
