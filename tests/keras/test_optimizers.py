"""Two ranks with half of each batch train the model that one rank trains with the whole of it."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

import ringtrain.keras as hvd
from ringtrain.collectives import Collective
from ringtrain.collectives.gradients import GradientReduction
from ringtrain.errors import UsageError
from ringtrain.step.optimizers import FUSED_UPDATES
from ringtrain.step.train_step import set_precision
from tests.keras.training import WAYS, dataset, largest_difference, make_batches, make_model, split_batches, train
from tests.world.group import on_ranks
from tests.world.training import assert_same_bits_on_all_ranks, multi_optimizer

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
    "Muon": {"learning_rate": 0.01},
    "ScheduleFreeAdamW": {"learning_rate": 0.01, "warmup_steps": 3},  # from Keras 3.14 on
    "MultiOptimizer": {},  # from Keras 3.15 on
    "LossScaleOptimizer of a MultiOptimizer": {},
}
# Muon of Keras before 3.13 reads an attribute that variables have on other backends only.
BROKEN_IN_KERAS = {"Muon"} if Version(keras.__version__) < Version("3.13") else set()
THERE = {
    name for name in OPTIMIZERS if name not in BROKEN_IN_KERAS and hasattr(keras.optimizers, name.rpartition(" ")[2])
}
# The last one has the code of both others.
WITH_PARTS = [
    n for n in ("LossScaleOptimizer", "MultiOptimizer", "LossScaleOptimizer of a MultiOptimizer") if n in THERE
]
ALL_WAYS = ["SGD", *WITH_PARTS]
NOT_FUSED = ["Adam", "Adafactor"]  # one by its options, and one whose update is always that of Keras
# Keras' updates of it are others in eager mode than in a graph, with or without ringtrain.
OWN_WAY = {"ScheduleFreeAdamW"}
OPTIONS: dict[str, dict[str, Any]] = {
    "clipping of the reduced gradient": {"global_clipnorm": 0.05},
    "clipping of each": {"clipnorm": 0.02},
    "moving average": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 4},
    "accumulation": {"gradient_accumulation_steps": 2},
    "weight decay": {"weight_decay": 0.1},
}
CLIPPING = [settings for name, settings in OPTIONS.items() if "clipping" in name]  # Keras accepts one at a time
MOST_OPTIONS = {
    key: value for name in ("moving average", "accumulation", "weight decay") for key, value in OPTIONS[name].items()
}


def make_optimizer(name: str) -> keras.optimizers.Optimizer:
    if name == "LossScaleOptimizer":
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    if name == "MultiOptimizer":
        return multi_optimizer(keras.optimizers)
    if name == "LossScaleOptimizer of a MultiOptimizer":
        return keras.optimizers.LossScaleOptimizer(multi_optimizer(keras.optimizers))
    return getattr(keras.optimizers, name)(**OPTIMIZERS[name])


def train_distributed(way: str, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = make_model()
    train(way, model, hvd.DistributedOptimizer(optimizer), split_batches(make_batches(SAMPLES)))
    return model


def check_ways(
    collective: Collective, create: Callable[[], Any], ways: Sequence[str], alone_ways: Sequence[str] = ("loop",)
) -> None:
    """Compare the ranks with each other, and rank 0 with one process that trains on whole batches.

    (It is traced after distributed models, or the guards would report it.)
    """
    set_precision("float64")
    models = [train_distributed(way, create()) for way in ways]
    for model in models:
        assert_same_bits_on_all_ranks(model.variables, collective)
    if not collective.world.is_rank0:
        return
    alone = {way: make_model() for way in alone_ways}
    for way, model in alone.items():
        train(way, model, create(), make_batches(SAMPLES))
    differences = {
        way: largest_difference(model, alone.get(way) or alone["loop"]) for way, model in zip(ways, models, strict=True)
    }
    assert max(differences.values()) < TOLERANCE, differences


def slow_but(name: str, default: Collection[str]) -> list[pytest.MarkDecorator]:
    """The marks of a parameter, of which only some are tried by default."""
    return [] if name in default else [pytest.mark.slow]


def update(optimizer: keras.optimizers.Optimizer, gradients: np.ndarray) -> list[np.ndarray]:
    """Weights after a step for each of the gradients [steps, 3, 2]."""
    weights = [keras.Variable(np.ones(s), dtype="float64", name=n) for n, s in {"kernel": (3, 2), "bias": (2,)}.items()]
    for gradient in gradients:
        optimizer.apply([tf.constant(gradient), tf.constant(gradient[0])], weights)
    return [weight.numpy() for weight in weights]


def exclude_bias() -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


@on_ranks(2)
def test_every_optimizer_applies_the_mean_of_the_gradients(collective: Collective) -> None:
    """Also where a weight is excluded from weight decay."""
    hvd.init()
    set_precision("float64")
    of_all = np.random.default_rng(1).normal(size=(3, 2, 3, 2))
    creates: dict[str, Any] = {name: functools.partial(make_optimizer, name) for name in sorted(THERE)}
    for name, create in {**creates, "exclusion": exclude_bias}.items():
        mine = update(hvd.DistributedOptimizer(create()), of_all[:, hvd.rank()])
        for found, right in zip(mine, update(create(), of_all.mean(axis=1)), strict=True):
            np.testing.assert_allclose(found, right, rtol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        *(pytest.param(name, WAYS[:1], marks=slow_but(name, NOT_FUSED)) for name in sorted(THERE - set(ALL_WAYS))),
        *(pytest.param(name, WAYS[1:], marks=pytest.mark.slow) for name in sorted(THERE - set(ALL_WAYS))),
        *(pytest.param(name, WAYS, marks=slow_but(name, ["SGD", WITH_PARTS[-1]])) for name in ALL_WAYS),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
@on_ranks(2)
def test_two_ranks_equal_one(collective: Collective, name: str, ways: tuple[str, ...]) -> None:
    create = functools.partial(make_optimizer, name)
    check_ways(collective, create, ways, ways if name in OWN_WAY else ("loop",))


@pytest.mark.parametrize(
    "options", ["all that act on the reduced gradient", *(pytest.param(o, marks=pytest.mark.slow) for o in OPTIONS)]
)
@on_ranks(2)
def test_two_ranks_equal_one_with(collective: Collective, options: str) -> None:
    settings = OPTIONS.get(options, {**MOST_OPTIONS, "global_clipnorm": 0.05})
    check_ways(collective, functools.partial(keras.optimizers.Adam, 0.05, **settings), ("fit",), ("fit",))


FUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "SGD": (keras.optimizers.SGD, {}, "ResourceApplyGradientDescent"),
    "momentum": (keras.optimizers.SGD, {"momentum": 0.9}, "ResourceApplyKerasMomentum"),
    "Nesterov": (keras.optimizers.SGD, {"momentum": 0.9, "nesterov": True}, "ResourceApplyKerasMomentum"),
    "Adam": (keras.optimizers.Adam, {}, "ResourceApplyAdam"),
    "AdamW": (keras.optimizers.AdamW, {}, "ResourceApplyAdam"),
    "RMSprop": (keras.optimizers.RMSprop, {"momentum": 0.5}, "ResourceApplyRMSProp"),
}
SAME_CODE_AS_OTHERS = ("momentum", "Nesterov", "AdamW")  # use the same code as SGD and Adam


def test_every_fused_update_is_tried() -> None:
    assert FUSED_UPDATES.keys() == {kind for kind, _, _ in FUSED.values()}


def update_weights(optimizer: keras.optimizers.Optimizer) -> tuple[list[np.ndarray], str]:
    """Weights and slots after some steps, and the step's graph."""
    weights = [keras.Variable(np.linspace(-1, 1, size), dtype="float64") for size in (6, 2)]
    optimizer.build(weights)

    @tf.function(autograph=False)
    def step() -> None:
        optimizer.apply([optimizer.scale_loss(tf.sin(3 * weight.value)) for weight in weights], weights)

    for _ in range(4):
        step()
    optimizer.finalize_variable_values(weights)
    graph = step.get_concrete_function().graph.as_graph_def()
    return [variable.numpy() for variable in [*weights, *optimizer.variables]], str(graph)


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "RMSprop", *(pytest.param(n, marks=pytest.mark.slow) for n in SAME_CODE_AS_OTHERS)]
)
@on_ranks(1)
def test_a_fused_update_uses_one_operation_and_equals_keras(collective: Collective, name: str) -> None:
    """With each option, the loss scale of the optimizer, and that which compile() puts around it."""
    hvd.init()
    kind, settings, operation = FUSED[name]
    plain = functools.partial(kind, 0.05, **settings)
    around = functools.partial(keras.optimizers.LossScaleOptimizer, initial_scale=8.0, dynamic_growth_steps=2)
    each_clipping = [{**MOST_OPTIONS, **clipping, "loss_scale_factor": 8.0} for clipping in CLIPPING]
    cases: list[tuple[dict[str, Any], Any]] = [({}, around), *((each, lambda plain: plain) for each in each_clipping)]
    for options, wrap in cases:
        ours, graph = update_weights(wrap(hvd.DistributedOptimizer(plain(**options))))
        alone, graph_alone = update_weights(wrap(plain(**options)))
        assert (operation in graph, operation in graph_alone) == (True, False), options
        for mine, right in zip(ours, alone, strict=True):
            np.testing.assert_allclose(mine, right, rtol=1e-12, atol=1e-14, err_msg=str(options))


class OwnAdam(keras.optimizers.Adam):
    """May update as it likes."""


@on_ranks(2)
def test_a_subclassed_optimizer_keeps_its_own_update(collective: Collective) -> None:
    assert "ResourceApplyAdam" not in operations_of(OwnAdam())


def operations_of(optimizer: keras.optimizers.Optimizer) -> set[str]:
    """The types of the operations that an update is made of."""
    hvd.init()
    model = make_model()
    hvd.DistributedOptimizer(optimizer).build(model.trainable_variables)
    update = tf.function(lambda: optimizer.apply([v * 2 for v in model.trainable_variables], model.trainable_variables))
    return {operation.type for operation in update.get_concrete_function().graph.get_operations()}


@on_ranks(2)
def test_unsupported_optimizers_fail_in_plain_keras_too(collective: Collective) -> None:
    train_distributed("loop", keras.optimizers.SGD())
    for name in BROKEN_IN_KERAS:
        with pytest.raises(AttributeError, match="path"):
            train("loop", make_model(), getattr(keras.optimizers, name)(), make_batches(SAMPLES))


def test_every_optimizer_of_keras_is_tried() -> None:
    shipped = {
        name
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, keras.optimizers.Optimizer)
    }
    assert shipped - {"Optimizer"} == {name for name in THERE if " " not in name} | BROKEN_IN_KERAS


@pytest.mark.parametrize("name", WITH_PARTS[-1:])
@on_ranks(2)
def test_optimizers_with_parts_support_local_layers(collective: Collective, name: str) -> None:
    hvd.init()
    GradientReduction.calls = 0
    model = make_model()
    own = hvd.PartialDistributedOptimizer(make_optimizer(name), local_layers=model.layers, scale_local_gradients=False)
    train("fit", model, own, make_batches(4))
    GradientReduction.calls = 0
    with pytest.raises(UsageError, match="is not distributed"):
        train("fit", make_model(), make_optimizer(name), make_batches(4))


if "MultiOptimizer" in THERE:  # not with an older Keras

    def several(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """A MultiOptimizer with one that is given."""
        optimizers = keras.optimizers
        return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizer, {".*/bias": optimizers.Adam(name="other")}))

    @on_ranks(2)
    def test_distributed_parts_of_a_multi_optimizer_are_refused(collective: Collective) -> None:
        hvd.init()

        def distributed() -> keras.optimizers.Optimizer:
            return hvd.DistributedOptimizer(keras.optimizers.SGD(name="mine"))

        def chosen(variable: Any, parts: dict[str, Any] = {"part": None}) -> keras.optimizers.Optimizer:  # noqa: B006
            parts["part"] = parts["part"] or distributed()
            return parts["part"]

        for create in (
            lambda: hvd.DistributedOptimizer(several(distributed()), op=hvd.Sum),
            lambda: several(distributed()),
            lambda: keras.optimizers.LossScaleOptimizer(several(distributed())),
            lambda: keras.optimizers.MultiOptimizer(chosen),
        ):
            with pytest.raises(
                UsageError, match=r"^the optimizer .* are distributed by themselves \(mine\)\. Distribute it as a whole"
            ):
                train("loop", make_model(), create(), make_batches(4))

    @on_ranks(2)
    def test_learning_rate_callbacks_refuse_several_learning_rates(collective: Collective) -> None:
        hvd.init()
        model = make_model()
        model.compile(hvd.DistributedOptimizer(make_optimizer("MultiOptimizer")), "mean_squared_error")
        callback = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1)
        with pytest.raises(UsageError, match=r"a learning rate for each of its parts, and LearningRateWarmupCallback"):
            model.fit(dataset(make_batches(4)), callbacks=[callback], verbose=0)


@on_ranks(2)
def test_float8_training_is_refused_before_any_reduction(collective: Collective) -> None:
    model = make_model()
    model.quantize("float8")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    with pytest.raises(UsageError, match=r"and \d+ more of Keras' float8 training"):
        train("fit", model, optimizer, make_batches(4))
