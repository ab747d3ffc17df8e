"""make_parallel under every world: the result and the gradients of one process, on every rank."""

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain
from ringtrain.collectives import Collective
from ringtrain.collectives.base import Solo
from ringtrain.errors import UsageError
from ringtrain.parallel import make_parallel
from ringtrain.runtime.world import World
from tests.world.group import GLOO, on_ranks
from tests.world.training import assert_close

# Of three ranks, one is without samples where there are two, and two where there is one.
COUNTS = {1: (7,), 2: (7, 1), 3: (7, 2, 1)}
ALONE = Solo(World(rank=0, size=1, local_rank=0, local_size=1, node="here", launcher="no launcher"))
FORMS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda fn: fn,
    "function": functools.partial(tf.function, autograph=False),
    "dynamic": lambda fn: tf.function(fn, input_signature=[tf.TensorSpec([None, 3], tf.float64)]),
}


def samples(count: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(5).normal(size=(count, 3)))


def check(fn: Any, combine: Any, form: str, collective: Collective) -> None:
    """Compare the parallel function's results, twice, with those of the function itself."""
    parallel = FORMS[form](make_parallel(fn, combine=combine, collective=collective))
    for count, factor in itertools.product(COUNTS[collective.world.size], (1.0, -2.0)):
        x = factor * samples(count)
        actual, expected = parallel(x), fn(x)
        tf.nest.assert_same_structure(actual, expected)
        for got, wanted in zip(tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True):
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            assert_close(got, wanted, f"{combine}, {count} samples, {form}")


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_the_result_is_the_function_s(collective: Collective, form: str) -> None:
    def concat(x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x) @ tf.ones([3, 2], tf.float64)

    check(concat, "concat", form, collective)
    check(lambda x: tf.reduce_mean(x**2), "mean", form, collective)
    check(lambda x: tf.reduce_mean(x**2, axis=0), "mean", form, collective)
    check(lambda x: tf.reduce_sum(x, axis=0), "sum", form, collective)
    check(lambda x: tf.shape(x)[0], "sum", form, collective)
    check(lambda x: tf.cast(tf.repeat(x, 2, axis=0) > 0, tf.int32), "concat", form, collective)


@on_ranks(2)
def test_an_input_of_unknown_rank_is_divided_like_any_other(collective: Collective) -> None:
    parallel = make_parallel(tf.tanh, collective=collective)

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float64)], autograph=False)
    def both(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = parallel(x)
        return y, tape.gradient(y, x)

    x = samples(5)
    result, gradient = both(x)
    assert_close(result, tf.tanh(x), "result")
    assert_close(gradient, 1 - tf.tanh(x) ** 2, "gradient")


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2, slow=[3])
def test_structures_go_in_and_out(collective: Collective, form: str) -> None:
    def inner(pair: Any, *, extra: dict[str, tf.Tensor]) -> dict[str, Any]:
        x, y = pair
        return {"rows": [x + extra["z"], tf.cast(y, tf.int64)], "mean": tf.reduce_mean(x * y), "sum": tf.reduce_sum(y)}

    combine = {"rows": "concat", "mean": "mean", "sum": "sum"}
    parallel = make_parallel(inner, combine=combine, collective=collective)
    whole = FORMS[form](lambda x: parallel((x, 2 * x), extra={"z": x**2}))
    for count in COUNTS[collective.world.size]:
        expected = inner((samples(count), 2 * samples(count)), extra={"z": samples(count) ** 2})
        actual = whole(samples(count))
        tf.nest.assert_same_structure(actual, expected)
        for got, wanted in zip(tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True):
            assert_close(got, wanted, f"{count} samples")


class Model:
    """A function with variables of every kind of use, and losses of all three ways to combine."""

    COMBINE = ("concat", {"mean": "mean", "sum": "sum"})

    def __init__(self) -> None:
        generator = np.random.default_rng(8)
        self.kernel = tf.Variable(generator.normal(size=(3, 4)))
        self.table = tf.Variable(generator.normal(size=(6, 4)))
        self.scale = tf.Variable(generator.normal(size=3))
        self.unused = tf.Variable(tf.ones([], tf.float64))
        self.counter = tf.Variable(3, trainable=False)
        self.frozen = tf.Variable(tf.constant(1.5, tf.float64), trainable=False)
        self.variables = [self.kernel, self.table, self.scale, self.frozen]

    def fn(self, x: tf.Tensor, words: tf.Tensor, outer: tf.Tensor | None = None) -> Any:
        hidden = tf.tanh(x @ self.kernel) + tf.gather(self.table, words) * self.frozen
        hidden += tf.cast(self.counter, tf.float64)
        losses = tf.reduce_mean(hidden**2, axis=1)
        return hidden, {"mean": tf.reduce_mean(losses), "sum": tf.reduce_sum(hidden, axis=0)}

    def loss(self, fn: Any, x: tf.Tensor) -> tf.Tensor:
        """A loss whose inputs to fn depend on a variable, and which uses all of the result unevenly."""
        words = tf.cast(tf.range(tf.shape(x)[0]) * 2 % 6, tf.int32)
        hidden, reduced = fn(x * self.scale, words)
        ramp = tf.cast(tf.range(tf.shape(hidden)[0]), tf.float64)[:, tf.newaxis]
        regularization = tf.reduce_sum(self.kernel**3)
        return (
            tf.reduce_sum(tf.sin(hidden) * ramp)
            + reduced["mean"] ** 2
            + tf.reduce_sum(reduced["sum"] ** 3)
            + regularization
        )

    def gradients(self, fn: Any, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, self.frozen])
            loss = self.loss(fn, x)
        gradients = tape.gradient(loss, [x, *self.variables, self.unused])
        assert gradients.pop() is None
        return loss, [tf.convert_to_tensor(gradient) for gradient in gradients]


@pytest.mark.parametrize("form", FORMS)
@on_ranks(3, slow=[1])
def test_gradients_are_those_of_one_process(collective: Collective, form: str) -> None:
    model = Model()
    parallel = make_parallel(model.fn, combine=model.COMBINE, collective=collective)
    compute = FORMS[form](lambda x: model.gradients(parallel, x))
    for count in COUNTS[collective.world.size]:
        loss, gradients = compute(samples(count))
        expected_loss, expected = model.gradients(model.fn, samples(count))
        assert_close(loss, expected_loss, "loss")
        for name, got, wanted in zip(("x", "kernel", "table", "scale", "frozen"), gradients, expected, strict=True):
            assert_close(got, wanted, f"{name} of {count} samples")


@on_ranks(2, slow=[3])
def test_a_tape_outside_of_the_graph_gets_the_same_gradients(collective: Collective) -> None:
    model = Model()
    parallel = tf.function(make_parallel(model.fn, combine=model.COMBINE, collective=collective))
    for count in COUNTS[collective.world.size]:
        gradients, expected = (model.gradients(fn, samples(count))[1] for fn in (parallel, model.fn))
        for got, wanted in zip(gradients[:-1], expected[:-1], strict=True):
            assert_close(got, wanted, f"{count} samples")


@pytest.mark.parametrize("form", ["eager", "function"])
@on_ranks(2, slow=[3])
def test_tensors_of_the_surrounding_code_have_gradients(collective: Collective, form: str) -> None:
    """They are not sliced, and another value at the next call is seen."""
    weight = tf.Variable([1.0, 2.0, 3.0], dtype=tf.float64)

    def gradient(x: tf.Tensor, fixed: Any) -> Any:
        with tf.GradientTape() as tape:
            squared = weight**2

            def fn(x: tf.Tensor) -> tf.Tensor:
                return tf.reduce_mean(x * squared) if fixed is None else fixed

            if fixed is None:
                loss = make_parallel(fn, combine="mean", collective=collective, x=x)
            else:
                loss = tf.reduce_mean(x * squared)
        return tape.gradient(loss, weight)

    compute = FORMS[form](lambda x: gradient(x, None))
    for count in COUNTS[collective.world.size]:
        for _ in range(2):
            got = compute(samples(count))
            assert_close(got, gradient(samples(count), 0), f"{count} samples")
            weight.assign(weight * 1.5)


@on_ranks(2, slow=[3])
def test_a_reused_function_sees_closure_tensors_of_each_call(collective: Collective) -> None:
    offset = tf.constant(0.0, tf.float64)
    parallel = make_parallel(lambda x: x + offset, collective=collective)
    for value in (1.0, 2.0):
        offset = tf.constant(value, tf.float64)
        assert_close(parallel(samples(4)), samples(4) + value, "shifted")


@on_ranks(2, slow=[3])
def test_a_function_runs_twice_in_a_graph_with_constant_inputs(collective: Collective) -> None:
    """TensorFlow's optimizer would fold collectives of constants, and merge two of the same input."""
    weight = tf.Variable(2.0, dtype=tf.float64)
    parallel = make_parallel(lambda x: x**2, collective=collective)
    weighted = make_parallel(lambda x: tf.reduce_sum(x * weight), combine="sum", collective=collective)
    x = samples(5)

    @tf.function(autograph=False)
    def twice() -> Any:
        with tf.GradientTape() as tape:
            total = weighted(x) + 3 * weighted(x)
        return parallel(x) + parallel(x) + parallel(parallel(x)), tape.gradient(total, weight)

    for _ in range(2):
        rows, gradient = twice()
        assert_close(rows, 2 * x**2 + x**4, "rows")
        assert_close(gradient, 4 * tf.reduce_sum(x), "gradient")


@on_ranks(2, slow=[3])
def test_second_derivatives_are_those_of_one_process(collective: Collective) -> None:
    def fn(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(x**3, axis=1)

    def penalty(fn: Any, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(fn(x) ** 2)
            gradient = tape.gradient(loss, x)
            total = tf.reduce_sum(gradient**2)
        return outer.gradient(total, x)

    parallel = make_parallel(fn, collective=collective)
    for form in ("eager", "function"):
        compute = FORMS[form](lambda x: penalty(parallel, x))
        for count in COUNTS[collective.world.size]:
            got = compute(samples(count))
            assert_close(got, penalty(fn, samples(count)), f"{form}, {count} samples")


@on_ranks(2)
def test_a_keras_model_is_a_function(collective: Collective) -> None:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    parallel = make_parallel(model, collective=collective)
    x = samples(7)
    results = []
    for fn in (model, parallel):
        with tf.GradientTape() as tape:
            outputs = fn(x)
            loss = tf.reduce_sum(outputs**2)
        results.append([outputs, *tape.gradient(loss, [v.value for v in model.trainable_variables])])
    for wanted, got in zip(*results, strict=True):
        assert_close(got, wanted, "keras", tolerance=1e-6)


@on_ranks(2, slow=[3])
def test_it_is_a_decorator(collective: Collective) -> None:
    @make_parallel(collective=collective)
    def double(x: tf.Tensor) -> tf.Tensor:
        """Twice x."""
        return 2 * x

    @make_parallel  # connects by the environment, when first called
    def triple(x: tf.Tensor) -> tf.Tensor:
        return 3 * x

    assert (double.__name__, double.__doc__) == ("double", "Twice x.")
    assert_close(double(samples(5)), 2 * samples(5), "double")
    assert_close(triple(samples(5)), 3 * samples(5), "triple")


@on_ranks(2)
def test_each_rank_runs_its_own_slice_and_never_an_empty_one(collective: Collective) -> None:
    seen: list[Any] = []

    @make_parallel(collective=collective)
    def fn(x: tf.Tensor) -> tf.Tensor:
        tf.numpy_function(lambda x: seen.append(x.tolist()), [x], [])
        return x

    fn(np.arange(3.0))
    fn(np.arange(1.0))
    assert seen == ([[0.0], [0.0]] if collective.world.rank == 0 else [[1.0, 2.0], [0.0]])


@on_ranks(2)
def test_types_that_cannot_be_sent_between_ranks_are_named(collective: Collective) -> None:
    for dtype in (tf.complex64, tf.bfloat16, tf.string):
        with pytest.raises(UsageError, match=f"is {dtype.name}, which does not travel between ranks"):
            make_parallel(lambda x, dtype=dtype: as_type(x, dtype), collective=collective)(np.ones(3))


def as_type(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.strings.as_string(x) if dtype == tf.string else tf.cast(x, dtype)


@on_ranks(1, 3)
def test_no_samples_give_the_function_s_result_for_none(collective: Collective) -> None:
    nothing = tf.zeros([0, 3], tf.float64)
    assert make_parallel(lambda x: 2 * x, collective=collective)(nothing).shape == (0, 3)
    total = make_parallel(lambda x: tf.reduce_sum(x) + 1, combine="sum", collective=collective)(nothing)
    assert float(total) == 1


@pytest.mark.slow
@on_ranks(GLOO)
def test_gradients_over_gloo(collective: Collective) -> None:
    test_gradients_are_those_of_one_process.body(collective, "function")


GIVEN: dict[str, tuple[Any, Any, str]] = {
    "rows": (np.ones([10, 3]), np.ones([7, 3]), r"float64 \[10, 3\] on rank 0, float64 \[7, 3\] on rank 1"),
    "no rows": (np.ones([1, 3]), np.ones([0, 3]), r"float64 \[1, 3\] on rank 0, float64 \[0, 3\] on rank 1"),
    "columns": (np.ones([4, 3]), np.ones([4, 2]), r"float64 \[4, 3\] on rank 0, float64 \[4, 2\] on rank 1"),
    "type": (np.ones([4, 3]), np.ones([4, 3], "f"), r"float64 \[4, 3\] on rank 0, float32 \[4, 3\] on rank 1"),
}


def difference(what: str) -> str:
    return f"input argument 0 of a parallel function is {GIVEN[what][2]}; it must be the same on all ranks"


@pytest.mark.parametrize("what", GIVEN)
@pytest.mark.parametrize("combine", ["concat", "mean"])
@on_ranks(2)
def test_inputs_that_differ_by_rank_are_reported_on_all(collective: Collective, combine: str, what: str) -> None:
    def fn(x: tf.Tensor) -> tf.Tensor:
        return x * 2 if combine == "concat" else tf.reduce_mean(x, axis=0)

    inputs = GIVEN[what][collective.world.rank]
    parallel = make_parallel(fn, combine=combine, collective=collective)
    parallel(np.ones([4, 3]))  # ranks that have traced it before, and such as have not, meet
    with pytest.raises(UsageError, match=difference(what)) as told:
        parallel(inputs)
    assert "\n" not in str(told.value)
    assert_close(parallel(np.ones([4, 3])), fn(tf.ones([4, 3], tf.float64)), "the next call")


@pytest.mark.parametrize(("what", "combine"), [*((what, "concat") for what in GIVEN), ("rows", "mean")])
@on_ranks(2)
def test_in_a_graph_inputs_that_differ_by_rank_are_reported(collective: Collective, combine: str, what: str) -> None:
    def fn(x: tf.Tensor) -> tf.Tensor:
        return x * 2 if combine == "concat" else tf.reduce_mean(x, axis=0)

    inputs = tf.constant(GIVEN[what][collective.world.rank])
    parallel = make_parallel(fn, combine=combine, collective=collective)
    graphs = [tf.function(parallel, autograph=False)]
    if what != "type":
        graphs.append(tf.function(parallel, input_signature=[tf.TensorSpec([None, None], tf.float64)], autograph=False))
    for graph in graphs:
        graph(tf.ones([4, 3], tf.float64))
        with pytest.raises(tf.errors.InvalidArgumentError, match=difference(what)):
            graph(inputs)
        assert_close(graph(tf.ones([4, 3], tf.float64)), fn(tf.ones([4, 3], tf.float64)), "the next call")


@on_ranks(3)
def test_inputs_that_fail_on_one_rank_are_reported_on_all(collective: Collective) -> None:
    kernel = tf.Variable(tf.ones([3, 2]))
    flag = collective.world.rank == 2
    with pytest.raises(UsageError, match=r"'x' .* is float32 \[6, 3\] on ranks 0, 2, float32 \[6, 4\] on rank 1"):
        make_parallel(lambda x: x @ kernel, collective=collective)(x=tf.ones([6, 3 + (collective.world.rank == 1)]))
    with pytest.raises(UsageError, match=r"'flag' .* is False on ranks 0, 1, True on rank 2; it must"):
        make_parallel(lambda x, flag: x * flag, collective=collective)(x=tf.ones([6, 3]), flag=flag)
    with pytest.raises(UsageError, match=r"argument 1 .* is nothing on ranks 0, 1, float32 \[6, 3\] on rank 2;"):
        make_parallel(lambda x, y=None: x, collective=collective)(*[tf.ones([6, 3])] * (1 + flag))


@on_ranks(2)
def test_static_shapes_of_a_graph_are_not_compared(collective: Collective) -> None:
    """As on a rank that has called a function more often, whose next trace is of any shape."""
    parallel = make_parallel(lambda x: 2 * x, collective=collective)
    signature = [tf.TensorSpec([7, 3] if collective.world.rank else [None, None], tf.float64)]
    graph = tf.function(parallel, input_signature=signature, autograph=False)
    assert_close(graph(samples(7)), 2 * samples(7), "doubled")


@on_ranks(2)
def test_functions_within_a_function_run_side_by_side(collective: Collective) -> None:
    """One trace twice, and two traces of one function: their collectives have names of their own."""
    inner = tf.function(make_parallel(lambda x: 2 * x, collective=collective), autograph=False)

    @tf.function(autograph=False)
    def outer(x: tf.Tensor, y: tf.Tensor) -> Any:
        return inner(x), inner(x + 1), inner(y), inner(y + 1)

    for _ in range(3):
        results = outer(samples(7), samples(2))
        for got, wanted in zip(results, (samples(7), samples(7) + 1, samples(2), samples(2) + 1), strict=True):
            assert_close(got, 2 * wanted, "doubled")


def polynomial(x: tf.Tensor, coefficients: tf.Variable) -> tf.Tensor:
    return coefficients[0] * x**2 + coefficients[1] * x + coefficients[2]


def fit(collective: Collective, steps: int) -> np.ndarray:
    """The classic custom training loop: fit y = 5x²+3 with Adam."""
    generator = np.random.default_rng(0)
    coefficients = tf.Variable(tf.zeros(3, tf.float64))
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build([coefficients])

    def loss_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean((polynomial(x, coefficients) - y) ** 2)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float64)])
    def train(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = make_parallel(loss_of, combine="mean", collective=collective, x=x, y=5 * x**2 + 3)
        optimizer.apply(tape.gradient(loss, [coefficients]), [coefficients])

    for _ in range(steps):
        train(tf.constant(generator.uniform(-1, 1, 10)))
    return coefficients.numpy()


@on_ranks(2)
def test_the_classic_loop_fits_a_polynomial_as_one_process(collective: Collective) -> None:
    keras.config.set_floatx("float64")
    try:
        coefficients = fit(collective, 400)
        np.testing.assert_allclose(coefficients, fit(ALONE, 400), rtol=0, atol=1e-10)
    finally:
        keras.config.set_floatx("float32")
    np.testing.assert_allclose(coefficients, [5, 0, 3], atol=0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: make_parallel(f, collective=ALONE)(), "without inputs"),
        (lambda f: make_parallel(f, collective=ALONE)([]), "without inputs"),
        (lambda f: make_parallel(f, collective=ALONE, x=np.ones(3), y=np.ones(2)), r"3 \('x'\), 2 \('y'\) samples"),
        (lambda f: make_parallel(f, collective=ALONE)(np.ones(3), 2.0), "argument 1 .* is a scalar"),
        (lambda f: make_parallel(f, collective=ALONE)(np.ones(3), object()), "argument 1 .* must be tensors"),
        (lambda f: make_parallel(f, collective=ALONE)(x=object()), "'x' .* must be tensors"),
        (lambda f: make_parallel(f, combine="average"), "'average'; each word must be"),
        (lambda f: make_parallel(f, combine=None), "None; each word must be"),
        (lambda f: make_parallel(f, combine=["concat"] * 2, collective=ALONE)(np.ones(3)), "does not match"),
        (lambda f: make_parallel(f, combine={"a": "sum"}, collective=ALONE)(np.ones(3)), "does not match"),
        (lambda f: make_parallel(tf.reduce_sum, collective=ALONE)(np.ones(3)), "is a scalar, which cannot be joined"),
        (lambda f: make_parallel(f, combine="mean", collective=ALONE)(np.ones(3)), "not the same on every rank"),
        (lambda f: make_parallel(tf.reduce_sum, combine="mean", collective=ALONE)(np.ones(3, int)), "has no means"),
        (lambda f: make_parallel(lambda x: make_parallel(f, x=x), collective=ALONE)(np.ones(3)), "divided again"),
        (lambda f: make_parallel(x=np.ones(3)), "fn=None, which cannot be called; the function comes first"),
        (lambda f: make_parallel(f(3)), "cannot be called"),
    ],
)
def test_misuse_is_named(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(lambda x, y=None: x)


def test_the_package_offers_it_without_starting_tensorflow() -> None:
    script = "import sys, ringtrain; print('tensorflow' in sys.modules, hasattr(ringtrain, 'nothing'))"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout == "False False\n"
    assert ringtrain.make_parallel is make_parallel
