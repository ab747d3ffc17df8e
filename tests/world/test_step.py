"""The training step under every world: N ranks train what one process trains, and no rank decides alone."""

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.collectives.base import Solo
from ringtrain.collectives.gradients import GradientReduction
from ringtrain.config import Config
from ringtrain.data.sources import Source, from_arrays
from ringtrain.errors import UsageError
from ringtrain.run.variables import broadcast_variables, is_seed_state
from ringtrain.runtime import activity
from ringtrain.runtime.activity import Note, Phase
from ringtrain.runtime.world import World
from ringtrain.step.loss_scale import INITIAL_LOSS_SCALE, LossScale
from ringtrain.step.report import StepReport
from ringtrain.step.train_step import TrainStep
from ringtrain.training.evaluation import EvalReport, EvalStep, evaluate, evaluation_batches
from ringtrain.training.job import create_job
from ringtrain.workloads.base import Workload
from tests.world.group import GLOO, on_ranks
from tests.world.training import (
    BIAS_DECAY,
    KERNEL_DECAY,
    MODELS,
    NUM_CLASSES,
    NUM_FEATURES,
    OPTIMIZERS,
    Classification,
    assert_close,
    assert_same_bits_on_all_ranks,
    batches_of,
    batchnorm_model,
    bits_of,
    check_trains_as_plainly,
    create_step,
    dense_samples,
    make_batch,
    order_of,
    regularised_model,
    spec_of,
    train,
    train_plainly,
)

GLOBAL_BATCH_SIZE = 11  # neither 2 nor 3 divides it
STEPS = 11  # two epochs of five steps, and one of the next


@pytest.mark.parametrize(
    ("model", "optimizer", "accumulate", "num_samples"),
    [  # of 45 samples, the fifth step of an epoch has 1, so that one of two ranks has none
        ("regularised", "momentum", 1, 46),
        ("regularised", "clipped", 1, 45),
        ("regularised", "adam", 3, 46),
        ("embedding", "momentum", 1, 46),
        ("embedding", "adam", 3, 45),
        ("twin embeddings", "momentum", 1, 45),
    ],
)
@on_ranks(2, slow=[1])
def test_n_ranks_equal_one_process(
    collective: Collective, model: str, optimizer: str, accumulate: int, num_samples: int
) -> None:
    create, create_samples = MODELS[model]
    source = create_samples(num_samples)
    batches = batches_of(source, collective, global_batch_size=GLOBAL_BATCH_SIZE, steps=STEPS)
    usual = order_of(source, GLOBAL_BATCH_SIZE).local_batch(0, rank=collective.world.rank, size=collective.world.size)
    has_own_trace = optimizer == "momentum" or accumulate > 1  # for the usual size; all others have one trace for any
    step = create_step(
        collective,
        create,
        OPTIMIZERS[optimizer],
        batches.element_spec,
        accumulate=accumulate,
        local_batch_size=len(usual.indices) if has_own_trace else None,
    )
    reports, plain_optimizer = check_trains_as_plainly(
        step,
        batches,
        create,
        OPTIMIZERS[optimizer],
        source,
        collective,
        global_batch_size=GLOBAL_BATCH_SIZE,
        steps=STEPS,
    )
    if collective.world.is_rank0:
        for variable, right in zip(step.optimizer.variables, plain_optimizer.variables, strict=True):
            assert_close(variable.numpy(), right.numpy(), variable.path)
    assert [report.samples for report in reports] == [*2 * [11, 11, 11, 11, num_samples - 44], 11]


@pytest.mark.parametrize(
    ("model", "optimizer", "accumulate", "num_samples"),
    [
        ("regularised", "momentum", 1, 46),
        ("embedding", "adam", 3, 45),
        pytest.param("twin embeddings", "clipped", 1, 45, marks=pytest.mark.slow),
        *(  # optimizers between which the step does not distinguish
            pytest.param("regularised", name, 1, 45, marks=pytest.mark.slow)
            for name in ("adam", "adamw", "adding up", "muon", "multi")
            if name in OPTIMIZERS
        ),
    ],
)
@on_ranks(3)
def test_three_ranks_equal_one_process(
    collective: Collective, model: str, optimizer: str, accumulate: int, num_samples: int
) -> None:
    test_n_ranks_equal_one_process.body(collective, model, optimizer, accumulate, num_samples)


@on_ranks(GLOO)
def test_ranks_over_gloo_equal_one_process(collective: Collective) -> None:
    test_n_ranks_equal_one_process.body(collective, "regularised", "momentum", 1, 46)


@pytest.mark.parametrize("jit_compile", [False, True])
@on_ranks(2)
def test_the_embedding_s_gradient_travels_sparse(collective: Collective, jit_compile: bool) -> None:
    """Else the equality of sparse gradients above would show nothing."""
    create, create_samples = MODELS["embedding"]
    batches = batches_of(create_samples(46), collective, global_batch_size=4, steps=1)
    right_call, travelling = GradientReduction.__call__, list[bool]()

    def note(self: Any, gradients: Any, *others: Any) -> Any:
        travelling[:] = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
        return right_call(self, gradients, *others)

    with mock.patch.object(GradientReduction, "__call__", note):
        step = create_step(collective, create, OPTIMIZERS["momentum"], batches.element_spec, jit_compile=jit_compile)
    assert travelling == [dtype is not None for dtype in step._structure.sparse_index_dtypes] == [True, False, False]


if "multi" in OPTIMIZERS:  # not with an older Keras

    @on_ranks(2)
    def test_parts_of_a_multi_optimizer_keep_their_learning_rates(collective: Collective) -> None:
        batches = batches_of(dense_samples(46), collective, global_batch_size=GLOBAL_BATCH_SIZE, steps=3)
        step = create_step(collective, regularised_model, OPTIMIZERS["multi"], batches.element_spec)
        assert [report.learning_rate for report in train(step, batches)] == 3 * [0.01]
        assert [float(part.learning_rate) for part in step.optimizer.optimizers] == pytest.approx([0.01, 0.1])


@on_ranks(2)
def test_float8_training_is_refused_before_any_reduction(collective: Collective) -> None:
    workload, config = Classification(regularised_model), Config(steps=1, batch_size=4, precision="float64")
    with pytest.raises(UsageError, match=r"the variable .*/inputs_scale and \d+ more of Keras' float8 training"):
        create_job(workload, config, collective, num_threads=1, adapt_model=lambda model: model.quantize("float8"))


@on_ranks(2, slow=[1, 3])
def test_the_logged_loss_is_the_mean_over_samples_of_all_ranks(collective: Collective) -> None:
    source = dense_samples(46)
    batches = batches_of(source, collective, global_batch_size=GLOBAL_BATCH_SIZE, steps=5)
    step = create_step(collective, regularised_model, OPTIMIZERS["momentum"], batches.element_spec)
    for number, batch in enumerate(batches):
        kernel, bias, kernel_2, bias_2 = [weight.numpy() for weight in step.model.trainable_variables]
        indices = order_of(source, GLOBAL_BATCH_SIZE).local_batch(number, rank=0, size=1).indices
        x, y = source.x.numpy()[indices], source.y.numpy()[indices]
        logits = np.tanh(x @ kernel + bias) @ kernel_2 + bias_2
        data_loss = np.mean(np.log(np.sum(np.exp(logits), axis=1)) - logits[np.arange(len(y)), y])
        report = step.read(step(batch, 0.1))
        assert_close(report.data_loss, data_loss, "data_loss")
        loss = data_loss + KERNEL_DECAY * np.sum(kernel**2) + BIAS_DECAY * np.sum(bias_2**2)
        assert_close(report.loss, loss, "loss")
        assert report.metrics["accuracy"] == pytest.approx(np.mean(np.argmax(logits, axis=1) == y), abs=1e-12)


@on_ranks(1)
def test_losses_added_by_layers_are_trained_as_in_keras(collective: Collective) -> None:
    def create() -> keras.Model:
        dense = keras.layers.Dense(NUM_CLASSES, activity_regularizer=keras.regularizers.L2(KERNEL_DECAY))
        return keras.Sequential([keras.Input((NUM_FEATURES,)), dense])

    source = dense_samples(46)
    batches = batches_of(source, collective, global_batch_size=GLOBAL_BATCH_SIZE, steps=3)
    step = create_step(collective, create, OPTIMIZERS["momentum"], batches.element_spec)
    reference, optimizer = create(), OPTIMIZERS["momentum"]()
    reference.set_weights(step.model.get_weights())
    losses = [report.loss for report in train(step, batches)]
    expected = train_plainly(reference, optimizer, source, global_batch_size=GLOBAL_BATCH_SIZE, steps=3)
    assert_close(losses, [loss for loss, _, _ in expected], "loss")
    for variable, right in zip(step.model.variables, reference.variables, strict=True):
        assert_close(variable.numpy(), right.numpy(), variable.path)


@on_ranks(2, slow=[1])
def test_weight_averages_are_updated_and_used_in_evaluation(collective: Collective) -> None:
    source = dense_samples(23)
    batches = batches_of(source, collective, global_batch_size=GLOBAL_BATCH_SIZE, steps=5)
    step = create_step(collective, regularised_model, OPTIMIZERS["adam"], batches.element_spec, ema=0.25)
    averages = [weight.numpy() for weight in step.model.trainable_variables]
    for number, batch in enumerate(batches, start=1):
        step(batch, 0.1)
        decay = min(0.25, (1 + number) / (10 + number))
        weights = [weight.numpy() for weight in step.model.trainable_variables]
        averages = [decay * a + (1 - decay) * w for a, w in zip(averages, weights, strict=True)]
    for (weight, average), expected in zip(step.averages.pairs, averages, strict=True):
        assert_close(average.numpy(), expected, weight.path)
    eval_step = eval_step_of(step, collective, batches.element_spec)
    before = bits_of(step.variables)
    result = evaluate_on(eval_step, source, collective, global_batch_size=GLOBAL_BATCH_SIZE)
    assert result is not None
    assert bits_of(step.variables) == before
    for weight, average in step.averages.pairs:
        weight.assign(average.value)
    again = evaluate_on(eval_step, source, collective, global_batch_size=GLOBAL_BATCH_SIZE)
    assert again == result, "not the averages were evaluated"
    assert_same_bits_on_all_ranks(step.variables, collective)


@on_ranks(2, slow=[1, 3])
def test_a_vote_of_one_rank_reaches_all_in_steps_and_evaluations(collective: Collective) -> None:
    source = dense_samples(13)
    batches = batches_of(source, collective, global_batch_size=5, steps=2)
    step = create_step(collective, regularised_model, OPTIMIZERS["momentum"], batches.element_spec)
    is_last = collective.world.rank == collective.world.size - 1
    quiet, asked = (step(batch, 0.1, is_stop_wanted=is_last and bool(batch.step)) for batch in batches)
    assert not step.read(quiet).stop_votes
    assert step.read(asked).stop_votes
    eval_step = eval_step_of(step, collective, batches.element_spec)
    for global_batch_size in (1, 5):  # with one sample, the rank that votes has none
        answers = iter([False, True])
        result = evaluate_on(
            eval_step,
            source,
            collective,
            global_batch_size=global_batch_size,
            is_stop_wanted=lambda answers=answers: is_last and next(answers),
        )
        assert result is None


def eval_step_of(step: TrainStep, collective: Collective, spec: Any, workload: Workload | None = None) -> EvalStep:
    return EvalStep(
        workload=workload or Classification(regularised_model),
        model=step.model,
        averages=step.averages,
        collective=collective,
        batch_spec=spec,
    )


def evaluate_on(
    eval_step: EvalStep, source: Source, collective: Collective, *, global_batch_size: int, **options: Any
) -> EvalReport | None:
    batches = evaluation_batches(source, collective.world, global_batch_size=global_batch_size, num_threads=1)
    return evaluate(eval_step, batches, collective, **options)


@on_ranks(2, slow=[1, 3])
def test_evaluation_counts_each_sample_once(collective: Collective) -> None:
    source = dense_samples(13)
    spec = batches_of(source, collective, global_batch_size=5, steps=1).element_spec
    step = create_step(collective, regularised_model, OPTIMIZERS["momentum"], spec)
    eval_step = eval_step_of(step, collective, spec)
    kernel, bias, kernel_2, bias_2 = [weight.numpy() for weight in step.model.trainable_variables]
    logits = np.tanh(source.x.numpy() @ kernel + bias) @ kernel_2 + bias_2
    y = source.y.numpy()
    data_loss = np.mean(np.log(np.sum(np.exp(logits), axis=1)) - logits[np.arange(13), y])
    for global_batch_size in (1, 4, 5, 100):
        result = evaluate_on(eval_step, source, collective, global_batch_size=global_batch_size)
        assert result is not None
        assert result.samples == 13
        assert_close(result.data_loss, data_loss, "data_loss")
        assert_close(result.loss, data_loss + KERNEL_DECAY * np.sum(kernel**2) + BIAS_DECAY * np.sum(bias_2**2), "loss")
        assert_close(result.metrics["accuracy"], np.mean(np.argmax(logits, axis=1) == y), "accuracy")


@on_ranks(2)
def test_metrics_may_have_another_order_on_each_rank(collective: Collective) -> None:
    class Unordered(Classification):  # as those of a set, whose order Python draws anew for each process
        def metrics(self, y: tf.Tensor, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
            values = {"one": tf.ones_like(outputs[:, 0]), "two": 2 * tf.ones_like(outputs[:, 0])}
            return dict(reversed(values.items())) if collective.world.rank else values

    source, workload = dense_samples(13), Unordered(regularised_model)
    batches = batches_of(source, collective, global_batch_size=5, steps=1)
    step = create_step(collective, regularised_model, OPTIMIZERS["momentum"], batches.element_spec, workload=workload)
    [report] = train(step, batches)
    eval_step = eval_step_of(step, collective, batches.element_spec, workload)
    result = evaluate_on(eval_step, source, collective, global_batch_size=5)
    assert result is not None
    assert report.metrics == result.metrics == {"one": 1, "two": 2}


@on_ranks(1)
def test_the_watchdog_hears_of_each_batch_of_an_evaluation(collective: Collective) -> None:
    source = dense_samples(13)
    spec = batches_of(source, collective, global_batch_size=5, steps=1).element_spec
    step = create_step(collective, regularised_model, OPTIMIZERS["momentum"], spec)
    eval_step = eval_step_of(step, collective, spec)
    for takes_long in (True, False):  # what compiles, compiles in the first batch
        with mock.patch.object(activity, "set_phase") as note:
            evaluate_on(eval_step, source, collective, global_batch_size=5)
        first = [Note(doing, 1, takes_long) for doing in (Phase.EVALUATION_DATA, Phase.EVALUATION_STEP)]
        others = [Note(doing, number) for number in (2, 3) for doing in (Phase.EVALUATION_DATA, Phase.EVALUATION_STEP)]
        said = [Note(*call.args, **call.kwargs) for call in note.call_args_list]
        assert said == [*first, *others, Note(Phase.EVALUATION_DATA, 4)]


@on_ranks(2, slow=[1, 3])
def test_moving_statistics_are_those_of_all_samples_on_all_ranks(collective: Collective) -> None:
    world = collective.world
    source = dense_samples(45)
    batches = batches_of(source, collective, global_batch_size=GLOBAL_BATCH_SIZE, steps=5)
    step = create_step(collective, batchnorm_model, OPTIMIZERS["momentum"], batches.element_spec)
    mean, variance = np.zeros(NUM_FEATURES), np.ones(NUM_FEATURES)
    for number, batch in enumerate(batches):
        step(batch, 0.1)
        slices = [
            order_of(source, GLOBAL_BATCH_SIZE).local_batch(number, rank=r, size=world.size) for r in range(world.size)
        ]
        parts = [(len(part.indices) / part.global_count, source.x.numpy()[part.indices]) for part in slices]
        parts = [(share, x) for share, x in parts if len(x)]
        # each rank's update from its own samples, weighted by how many it has
        mean = 0.75 * mean + 0.25 * sum(share * x.mean(axis=0) for share, x in parts)
        variance = 0.75 * variance + 0.25 * sum(share * x.var(axis=0) for share, x in parts)
        assert_same_bits_on_all_ranks(step.variables, collective)
        moving_mean, moving_variance = step.model.non_trainable_variables
        assert_close(moving_mean.numpy(), mean, "moving mean")
        assert_close(moving_variance.numpy(), variance, "moving variance")


@tf.custom_gradient
def poison_gradient(outputs: tf.Tensor, factor: tf.Tensor) -> Any:
    """The outputs as they are, their gradient times ``factor``."""
    return tf.identity(outputs), lambda upstream: (upstream * factor, tf.zeros_like(factor))


class FragileClassification(Classification):
    """Samples with the label -1 have a finite loss and a gradient that is NaN."""

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        factor = tf.where(y < 0, tf.constant(np.nan, outputs.dtype), 1.0)[:, tf.newaxis]
        return super().loss(tf.maximum(y, 0), poison_gradient(outputs, factor))


@on_ranks(2, slow=[1, 3])
def test_a_nonfinite_step_on_any_rank_changes_nothing_on_all(collective: Collective) -> None:
    world = collective.world
    x, y = np.random.default_rng(world.rank).normal(size=(2, NUM_FEATURES)), np.array([0, 1])

    def batch(number: int, bad_rank: int = -1, kind: str = "") -> Any:
        bad_x, bad_y = x.copy(), y.copy()
        if world.rank == bad_rank:
            if kind == "gradient":
                bad_y[1] = -1
            else:
                bad_x[1, 2] = {"nan": np.nan, "inf": np.inf}[kind]
        return make_batch(bad_x, bad_y, step=number, global_count=2 * world.size)

    step = create_step(
        collective,
        batchnorm_model,
        OPTIMIZERS["adam"],
        spec_of(batch(0)),
        workload=FragileClassification(batchnorm_model),
    )
    assert step.read(step(batch(0), 0.1)).is_finite
    before = bits_of(step.variables)
    for bad_rank in range(world.size):
        for kind in ("nan", "inf", "gradient"):
            returned = step(batch(1, bad_rank, kind), 0.05)
            assert not step.read(returned).is_finite
            assert bits_of(step.variables) == before, f"{kind} on rank {bad_rank}"
    assert step.read(step(batch(1), 0.1)).is_finite
    assert all(a != b for a, b in zip(bits_of(step.model.variables), before, strict=False))
    assert int(step.optimizer.iterations.numpy()) == 2
    assert_same_bits_on_all_ranks(step.variables, collective)


class Regression(Classification):
    """Squared error against 0."""

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.square(outputs), axis=1)

    def metrics(self, y: tf.Tensor, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {}


def one_weight_model() -> keras.Model:
    ones = keras.initializers.Ones()
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer=ones, use_bias=False)])


@pytest.mark.parametrize("jit_compile", [False, True])
@on_ranks(2, slow=[1, 3])
def test_a_loss_scale_overflow_on_one_rank_is_skipped_by_all(collective: Collective, jit_compile: bool) -> None:
    world = collective.world

    def batch(value: float) -> Any:
        return make_batch(np.full((1, 1), value, np.float32), np.zeros(1, np.int64), step=0, global_count=world.size)

    step = create_step(
        collective,
        one_weight_model,
        lambda: keras.optimizers.SGD(1e-6),
        spec_of(batch(0)),
        workload=Regression(one_weight_model),
        precision="mixed_float16",
        jit_compile=jit_compile,
    )
    first = [variable.numpy() for variable in step.variables]
    for bad_rank in range(world.size):
        for variable, value in zip(step.variables, first, strict=True):
            variable.assign(value)
        before = bits_of([*step.model.variables, *step.optimizer.variables])
        # the gradient of the output, 2 * 8 * scale / size, is beyond 65504 at first
        reports: list[StepReport] = []
        while not reports or not reports[-1].is_finite:
            assert bits_of([*step.model.variables, *step.optimizer.variables]) == before
            reports.append(step.read(step(batch(8.0 if world.rank == bad_rank else 1e-3), 1e-6)))
            assert len(reports) < 10
        assert len(reports) > 1
        assert [report.loss_scale for report in reports] == [INITIAL_LOSS_SCALE / 2**i for i in range(len(reports))]
        assert all(np.isfinite(report.loss) for report in reports)  # the loss itself never overflowed
        assert bits_of(step.model.variables) != before[: len(step.model.variables)]
        gradient = 2 * (64 + (world.size - 1) * 1e-6) / world.size
        assert_close(reports[-1].gradient_norm, gradient, "gradient norm, without the scale", tolerance=1e-2)
        [[weight]] = step.model.trainable_variables[0].numpy()
        assert_close(1 - weight, 1e-6 * gradient, "update, without the scale", tolerance=1e-2)
        assert_same_bits_on_all_ranks(step.variables, collective)


@on_ranks(1)
def test_the_loss_scale_halves_and_doubles_after_2000_good_steps(collective: Collective) -> None:
    scale = LossScale(is_dynamic=True)
    value, good_steps = scale.variables

    def after(*are_finite: bool) -> float:
        for is_finite in are_finite:
            scale.adapt(tf.constant(is_finite))
        return float(scale.value)

    def after_good(count: int) -> float:
        good_steps.assign(good_steps.value + (count - 1))  # all but the last of them, which change nothing else
        return after(True)

    assert after() == after(True) == 2.0**15
    assert [after_good(1998), after_good(1), after_good(1999), after_good(1)] == [2.0**15, 2.0**16, 2.0**16, 2.0**17]
    assert [after_good(1999), after(False)] == [2.0**17, 2.0**16]
    assert [after_good(1999), after_good(1)] == [2.0**16, 2.0**17]
    value.assign(2.0)
    assert after(False, False) == 1
    value.assign(2.0**127)
    assert after_good(2000) == 2.0**127
    assert float(LossScale(is_dynamic=False).value) == 1


BLOCK = 64


class SumOfOutputs(Regression):
    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(outputs, axis=1)


def dropout_model() -> keras.Model:
    layers = keras.layers
    dense = layers.Dense(1, use_bias=False)
    return keras.Sequential([keras.Input((3 * BLOCK,)), layers.Dropout(0.5), dense])


def kept_inputs(
    collective: Collective, x: np.ndarray, jit_compile: bool, *, seed: int = 0, step_numbers: Sequence[int] = (5,)
) -> list[np.ndarray]:
    """Inputs, of those that are 1 in ``x``, that the dropout of each step let through: those have a gradient."""
    batches = [make_batch(x, np.zeros(1), step=number, global_count=1) for number in step_numbers]
    step = create_step(
        collective,
        dropout_model,
        lambda: keras.optimizers.SGD(1.0),
        spec_of(batches[0]),
        workload=SumOfOutputs(dropout_model),
        seed=seed,
        jit_compile=jit_compile,
    )
    weights = [step.model.trainable_variables[0].numpy()]
    for batch in batches:
        step(batch, 1.0)
        weights.append(step.model.trainable_variables[0].numpy())
    return [(before - after)[:, 0] > 1 for before, after in itertools.pairwise(weights)]


@pytest.mark.parametrize("jit_compile", [False, True])
@on_ranks(2, slow=[1, 3])
def test_dropout_masks_are_a_function_of_seed_step_and_rank(collective: Collective, jit_compile: bool) -> None:
    world = collective.world
    # this rank on its own, told that it is one of four: its whole mask, in which the number of ranks plays no part
    alone = Solo(World(rank=world.rank, size=4, local_rank=0, local_size=1, node="", launcher="none"))
    everything = np.ones((1, 3 * BLOCK))
    mask, later, again = kept_inputs(alone, everything, jit_compile, step_numbers=(5, 6, 5))
    assert 0.25 < mask.mean() < 0.75
    np.testing.assert_array_equal(again, mask)
    assert not np.array_equal(later, mask)
    [other] = kept_inputs(alone, everything, jit_compile, seed=1)
    assert not np.array_equal(other, mask)
    masks = all_gather_object(collective, mask.tolist(), name="masks")
    assert len({tuple(item) for item in masks}) == world.size, "ranks share a mask"
    # all ranks together, each with a block of the inputs
    mine = np.zeros((1, 3 * BLOCK))
    blocks = [slice(rank * BLOCK, (rank + 1) * BLOCK) for rank in range(world.size)]
    mine[0, blocks[world.rank]] = 1
    [together] = kept_inputs(collective, mine, jit_compile)
    for rank, block in enumerate(blocks):
        np.testing.assert_array_equal(together[block], masks[rank][block])


@on_ranks(2)
def test_the_gradient_norm_is_right_in_single_precision(collective: Collective) -> None:
    source = dense_samples(46, "float32")
    batches = batches_of(source, collective, global_batch_size=GLOBAL_BATCH_SIZE, steps=1)
    spec, create_optimizer = batches.element_spec, OPTIMIZERS["momentum"]
    step = create_step(collective, regularised_model, create_optimizer, spec, precision="float32")
    reference = regularised_model()
    reference.set_weights(step.model.get_weights())
    plain = train_plainly(reference, create_optimizer(), source, global_batch_size=GLOBAL_BATCH_SIZE, steps=1)
    for report, (_, _, norm) in zip(train(step, batches), plain, strict=True):
        assert report.gradient_norm == pytest.approx(norm, rel=1e-5)


@on_ranks(1)
def test_micro_batches_have_masks_of_their_own(collective: Collective) -> None:
    batch = make_batch(np.ones((2, 3 * BLOCK)), np.zeros(2), step=0, global_count=2)
    step = create_step(
        collective,
        dropout_model,
        lambda: keras.optimizers.SGD(1.0),
        spec_of(batch),
        workload=SumOfOutputs(dropout_model),
        accumulate=2,
    )
    before = step.model.trainable_variables[0].numpy()
    step(batch, 1.0)
    changes = np.unique(np.round(before - step.model.trainable_variables[0].numpy(), 6))
    np.testing.assert_allclose(changes, [0, 1, 2], err_msg="an input is kept by none, one or both of the masks")


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
@on_ranks(1)
def test_no_two_steps_share_their_dropout_whatever_the_seed(collective: Collective, seed: int) -> None:
    batch = make_batch(np.ones((1, 3 * BLOCK)), np.zeros(1), step=0, global_count=1)
    step = create_step(collective, dropout_model, OPTIMIZERS["momentum"], spec_of(batch), seed=seed)
    states = [
        step.local_gradients._dropout_seeds(tf.constant(number), tf.constant(part))
        for number in range(200)
        for part in (0, 1)
    ]
    assert len({tuple(state.numpy()) for [state] in states}) == 400
    assert step._structure.state == ()  # they follow the step, and are nothing that the ranks would have to average


@on_ranks(1)
def test_a_step_is_traced_for_batches_of_a_kind_that_came_before(collective: Collective) -> None:
    def batch(num_samples: int) -> Any:
        x = np.zeros((num_samples, NUM_FEATURES))
        return make_batch(x, np.zeros(num_samples, np.int64), step=0, global_count=4)

    spec = spec_of(batch(4))
    step = create_step(collective, regularised_model, OPTIMIZERS["momentum"], spec, local_batch_size=4)
    for num_samples in (4, 3, 0):
        assert step.is_traced_for(batch(num_samples)) is (num_samples == 4)
        step(batch(num_samples), 0.1)
        assert step.is_traced_for(batch(num_samples))


@on_ranks(2, slow=[1, 3])
def test_first_values_reach_every_variable_and_slot_but_no_seed(collective: Collective) -> None:
    world = collective.world

    def create() -> keras.Model:
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((NUM_FEATURES,)), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(3)]
        )

    batch = make_batch(np.zeros((2, NUM_FEATURES), np.float32), np.array([0, 1]), step=0, global_count=2)
    step: TrainStep = create_step(
        collective, create, lambda: keras.optimizers.AdamW(0.01), spec_of(batch), precision="mixed_float16"
    )
    seeds = [variable for variable in step.model.variables if is_seed_state(variable)]
    everything = [*step.model.variables, *step.optimizer.variables, *step.loss_scale.variables]
    assert len(seeds) == 1
    assert len(everything) == 6 + 1 + 2 + 8 + 2  # weights, seed, iterations and rate, moments, loss scale
    for number, variable in enumerate(everything):
        variable.assign(tf.cast(tf.fill(variable.shape, 10 * number + world.rank), variable.dtype))
    broadcast_variables(step.variables, collective)
    for number, variable in enumerate(everything):
        expected = 10 * number + (world.rank if any(variable is seed for seed in seeds) else 0)
        np.testing.assert_array_equal(variable.numpy(), np.full(variable.shape, expected), err_msg=variable.path)


@on_ranks(1)
def test_an_optimizer_with_its_own_schedule_keeps_it(collective: Collective) -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, decay_steps=1, decay_rate=0.5)
    batches = batches_of(dense_samples(20), collective, global_batch_size=5, steps=3)
    step = create_step(collective, regularised_model, lambda: keras.optimizers.SGD(schedule), batches.element_spec)
    assert [report.learning_rate for report in train(step, batches)] == pytest.approx([0.5, 0.25, 0.125])


@on_ranks(2)
def test_samples_may_be_structures(collective: Collective) -> None:
    def create() -> keras.Model:
        left, right = keras.Input((2,), name="left"), keras.Input((1,), name="right")
        return keras.Model(
            {"left": left, "right": right}, keras.layers.Dense(3)(keras.layers.Concatenate()([left, right]))
        )

    generator = np.random.default_rng(0)
    x = {"left": generator.normal(size=(7, 2)), "right": generator.normal(size=(7, 1))}
    source = from_arrays(x, generator.integers(0, 3, 7))
    batches = batches_of(source, collective, global_batch_size=3, steps=3)  # the last is empty on rank 0
    step = create_step(collective, create, OPTIMIZERS["momentum"], batches.element_spec, accumulate=2)
    assert [report.samples for report in train(step, batches)] == [3, 3, 1]
    assert_same_bits_on_all_ranks(step.variables, collective)
