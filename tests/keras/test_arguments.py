"""What the arguments of DistributedOptimizer and of the tapes do to gradients."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain.keras as hvd
from ringtrain.collectives import Collective
from tests.world.group import on_ranks

SUM, MEAN = 3.0, 1.5  # of 1 on rank 0 and 2 on rank 1
SHAPE = (6, 2)

OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "nothing": ({}, MEAN),
    "sum": ({"op": hvd.Sum}, SUM),
    "split division": ({"gradient_predivide_factor": 4.0}, MEAN),
    "float16": ({"compression": hvd.Compression.fp16}, MEAN),
    "one group": ({"groups": 1}, MEAN),
    "three groups": ({"groups": 3}, MEAN),
    "groups of variables": ({"groups": lambda v: [[v[2], v[0]], [v[3].value, v[1].value]]}, MEAN),
    "sparse as dense": ({"sparse_as_dense": True}, MEAN),
    "a name with a slash": ({"name": "my optimizer/1"}, MEAN),
    "devices": ({"device_dense": "/cpu:0", "device_sparse": "/cpu:0"}, MEAN),
}


def create_variables(count: int = 4) -> list[keras.Variable]:
    return [keras.Variable(np.zeros(SHAPE), dtype="float64" if number else "float32") for number in range(count)]


def rank_gradients(collective: Collective, variables: list[keras.Variable]) -> list[Any]:
    """Rank r's: r + 1, 10(r + 1), ... everywhere; the last is sparse and names a row twice, another has none."""
    factor = collective.world.rank + 1.0
    gradients: list[Any] = [tf.fill(SHAPE, tf.cast(factor * 10**k, v.dtype)) for k, v in enumerate(variables)]
    rows = tf.constant([0, 0, collective.world.rank + 1])
    gradients[-1] = tf.IndexedSlices(tf.fill([3, 2], tf.cast(factor, tf.float64)), rows, tf.constant(SHAPE))
    return gradients


def apply(optimizer: keras.optimizers.Optimizer, gradients: list[Any], variables: list[keras.Variable]) -> None:
    optimizer.apply_gradients(zip(gradients, variables, strict=True))


def step_of(
    run: Callable[..., Any],
    collective: Collective,
    optimizer: keras.optimizers.Optimizer,
    variables: list[keras.Variable],
) -> Callable[[], None]:
    """One step, run by ``run``: as it is, or as a tf.function."""
    optimizer.build(variables)

    def step() -> None:
        apply(optimizer, rank_gradients(collective, variables), variables)

    return run(step)


RUNS: tuple[Callable[..., Any], ...] = (lambda step: step, tf.function)


def check(variables: list[keras.Variable], expected: float) -> None:
    """Variables of zeros after one step of SGD with rate 1, where ranks' values 1 and 2 make ``expected``."""
    for power, variable in enumerate(variables[:-1]):
        np.testing.assert_array_equal(-variable.numpy(), np.full(SHAPE, expected * 10**power), variable.path)
    of_one_and_two = expected / SUM * np.array([6.0, 1.0, 2.0, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(-variables[-1].numpy()[:, 0], of_one_and_two)


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(2)
def test_gradients_are_reduced(collective: Collective, options: str) -> None:
    arguments, expected = OPTIONS[options]
    for run in RUNS:
        variables = create_variables()
        groups = arguments.get("groups")
        its = {**arguments, "groups": groups(variables)} if callable(groups) else arguments
        step_of(run, collective, hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **its), variables)()
        check(variables, expected)


@on_ranks(2)
def test_the_old_name_of_groups_works_with_a_warning(collective: Collective) -> None:
    variables = create_variables()
    with pytest.warns(DeprecationWarning, match="num_groups has been replaced by groups"):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), num_groups=2)
    apply(optimizer, rank_gradients(collective, variables), variables)
    check(variables, MEAN)


@on_ranks(2)
def test_two_steps_in_one_graph_do_not_meet_each_other(collective: Collective) -> None:
    first, second = create_variables(), create_variables()
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)) for _ in range(2)]
    for optimizer, variables in zip(optimizers, (first, second), strict=True):
        optimizer.build(variables)

    @tf.function
    def step() -> None:
        apply(optimizers[0], rank_gradients(collective, first), first)
        apply(optimizers[1], rank_gradients(collective, second), second)
        apply(optimizers[1], rank_gradients(collective, second), second)

    step()
    check(first, MEAN)
    check([keras.Variable(v / 2, dtype=v.dtype) for v in second], MEAN)


@on_ranks(2)
def test_adasum_adds_orthogonal_and_averages_equal_gradients(collective: Collective) -> None:
    """Maleki et al. 2021, section 3."""
    equal, orthogonal = keras.Variable(np.zeros(2)), keras.Variable(np.zeros(2))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Adasum)
    mine = tf.one_hot(collective.world.rank, 2)
    apply(optimizer, [tf.constant([1.0, 3.0]), mine], [equal, orthogonal])
    np.testing.assert_allclose(-equal.numpy(), [1.0, 3.0], rtol=1e-6)
    np.testing.assert_allclose(-orthogonal.numpy(), [1.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("averages", [False, True])
@on_ranks(2)
def test_backward_passes_are_added_up_before_they_travel(collective: Collective, averages: bool) -> None:
    for run in RUNS:
        variables = create_variables(2)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0),
            backward_passes_per_step=3,
            average_aggregated_gradients=averages,
            sparse_as_dense=True,
        )
        step = step_of(run, collective, optimizer, variables)
        for number in range(1, 7):
            step()
            assert optimizer.iterations.numpy() == number
            assert optimizer._agg_helper.counter.numpy() == number % 3
            expected = (number // 3) * MEAN * (1 if averages else 3)
            np.testing.assert_allclose(-variables[0].numpy(), np.full(SHAPE, expected))


@on_ranks(2)
def test_an_infinite_gradient_is_gone_after_its_step(collective: Collective) -> None:
    variable = keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    results = []
    for factor in (float("inf"), 1.0, 1.0, 1.0):
        [(gradient, _)] = optimizer.compute_gradients(lambda factor=factor: variable * factor, [variable])
        optimizer.apply_gradients([(gradient, variable)])
        results.append(float(gradient))
    assert results[2:] == [1.0, 2.0]


@on_ranks(2)
def test_computed_gradients_are_reduced_once(collective: Collective) -> None:
    variable = keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    factor = collective.world.rank + 1.0
    optimizer.apply_gradients(optimizer.compute_gradients(lambda: variable * factor, [variable]))
    assert variable.numpy() == -SUM
    with tf.GradientTape() as tape:
        loss = variable * factor
    optimizer.apply_gradients(optimizer.compute_gradients(loss, [variable], tape=tape))
    assert variable.numpy() == -2 * SUM


@pytest.mark.parametrize("scales", [True, False])
@on_ranks(2)
def test_local_layers_keep_their_gradients(collective: Collective, scales: bool) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    for layer in model.layers:
        layer.set_weights([np.zeros_like(weight) for weight in layer.get_weights()])
    factor = collective.world.rank + 1.0
    local = factor / 2 if scales else factor
    expected = [-local, -local, -MEAN, -MEAN]
    gradients = [tf.fill(v.shape, factor) for v in model.trainable_variables]
    options = {"local_layers": model.layers[0], "scale_local_gradients": scales}
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), **options)
    apply(optimizer, gradients, model.trainable_variables)
    assert [float(v.numpy().min()) for v in model.trainable_variables] == expected

    with tf.GradientTape() as tape:
        loss = tf.add_n([factor * tf.reduce_sum(v) for v in model.trainable_variables])
    tape = hvd.PartialDistributedGradientTape(tape, **options)
    of_local, of_others = tape.get_local_and_global_gradients(loss, model.trainable_variables)
    assert [-float(tf.reduce_min(gradient)) for _, gradient in [*of_local, *of_others]] == expected
    assert [id(v) for v, _ in of_local] == [id(v) for v in model.layers[0].trainable_weights]


@on_ranks(2)
def test_a_tape_takes_nested_keras_and_tensorflow_variables(collective: Collective) -> None:
    factor = collective.world.rank + 1.0
    of_keras, of_tensorflow = keras.Variable([1.0, 2.0]), tf.Variable([3.0])
    with tf.GradientTape(persistent=True) as tape:
        loss = factor * (tf.reduce_sum(of_keras.value**2) + tf.reduce_sum(of_tensorflow))
    tape = hvd.DistributedGradientTape(tape)
    [first, second] = tape.gradient(loss, [of_keras, of_tensorflow])
    np.testing.assert_allclose(first, MEAN * np.array([2.0, 4.0]))
    np.testing.assert_allclose(second, [MEAN])
    np.testing.assert_allclose(tape.gradient(loss, {"a": of_tensorflow})["a"], [MEAN])
    np.testing.assert_allclose(tape.gradient(loss, of_tensorflow), [MEAN])
    assert isinstance(tape, tf.GradientTape)


@on_ranks(2)
def test_a_tape_s_gradients_train_in_a_compiled_loop(collective: Collective) -> None:
    variable = keras.Variable(0.0)
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([variable])

    @tf.function
    def step() -> None:
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
            loss = (collective.world.rank + 1.0) * variable.value
        optimizer.apply_gradients(zip(tape.gradient(loss, [variable]), [variable], strict=True))

    step()
    step()
    assert variable.numpy() == -2 * SUM
