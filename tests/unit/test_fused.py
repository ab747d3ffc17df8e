"""Optimizers with fused updates do what Keras' do."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.run.variables import named_slots
from ringtrain.step.optimizers import LARS, OWN, LayerwiseLamb

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sgd": (OWN["sgd"], keras.optimizers.SGD, {}),
    "momentum": (OWN["sgd"], keras.optimizers.SGD, {"momentum": 0.9}),
    "nesterov": (OWN["sgd"], keras.optimizers.SGD, {"momentum": 0.9, "nesterov": True, "global_clipnorm": 1.0}),
    "adam": (OWN["adam"], keras.optimizers.Adam, {"epsilon": 1e-3}),
    "amsgrad": (OWN["adam"], keras.optimizers.Adam, {"amsgrad": True}),
    "adamw": (OWN["adamw"], keras.optimizers.AdamW, {"weight_decay": 0.1}),
    "rmsprop": (OWN["rmsprop"], keras.optimizers.RMSprop, {"momentum": 0.9, "rho": 0.8}),
    "rmsprop centered": (OWN["rmsprop"], keras.optimizers.RMSprop, {"momentum": 0.9, "centered": True}),
    "rmsprop without momentum": (OWN["rmsprop"], keras.optimizers.RMSprop, {}),
    "lamb": (LayerwiseLamb, keras.optimizers.Lamb, {"weight_decay": 0.1}),
}
SHAPES = [(5, 4), (3,), ()]
STEPS = 20


def train(optimizer_class: Any, options: dict[str, Any], *, dtype: str, is_sparse: bool) -> dict[str, np.ndarray]:
    """What becomes of some variables, and of the optimizer's own, by their names in a checkpoint."""
    generator = np.random.default_rng(0)
    values = [generator.normal(size=shape) for shape in SHAPES]
    values[1][:] = 0  # as a bias begins
    variables = [keras.Variable(value, dtype=dtype, name=f"v{number}") for number, value in enumerate(values)]
    optimizer = optimizer_class(learning_rate=0.1, **options)
    optimizer.build(variables)

    @tf.function(autograph=False)
    def apply(gradients: list[Any], learning_rate: tf.Tensor) -> None:
        optimizer.learning_rate = learning_rate
        optimizer.apply(gradients, variables)

    for step in range(STEPS):
        gradients: list[Any] = [tf.constant(generator.normal(size=shape), dtype) for shape in SHAPES]
        if is_sparse:
            gradients[0] = tf.IndexedSlices(gradients[0][:2], tf.constant([3, 1]), tf.constant([5, 4]))
        apply(gradients, tf.constant(0.1 / (1 + step), tf.float64))
    named = [*((v.path, v) for v in variables), *named_slots(optimizer)]
    return {name: np.asarray(v.value, np.float64) for name, v in named}


@pytest.mark.parametrize("is_sparse", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("case", CASES)
def test_an_update_is_that_of_keras(case: str, is_sparse: bool) -> None:
    """Of several weights with dense gradients, and of one with a sparse gradient."""
    fused, plain, options = CASES[case]
    ours = train(fused, options, dtype="float64", is_sparse=is_sparse)
    theirs = train(plain, options, dtype="float64", is_sparse=is_sparse)
    assert list(ours) == list(theirs), "checkpoints hold the same names"
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-12, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["nesterov", "adamw"])
def test_other_types_are_updated_as_well(case: str, dtype: str) -> None:
    fused, plain, options = CASES[case]
    ours, theirs = (train(each, options, dtype=dtype, is_sparse=False) for each in (fused, plain))
    tolerance = {"float32": 1e-4, "bfloat16": 0.1}[dtype]
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_settings_are_those_of_keras(case: str) -> None:
    fused, plain, options = CASES[case]
    ours, theirs = (each(learning_rate=0.1, **options).get_config() for each in (fused, plain))
    assert ours | {"name": ""} == theirs | {"name": ""}, "Keras names an optimizer after its class"


def test_lars_is_the_paper_s() -> None:
    """You, Gitman, Ginsburg 2017, algorithm 1, written down once more; of what is excluded, momentum alone."""
    generator = np.random.default_rng(0)
    values = {
        name: generator.normal(size=shape) for name, shape in (("kernel", (5, 4)), ("bias", (4,)), ("zero", (3,)))
    }
    values["zero"][:] = 0
    variables = [keras.Variable(value, dtype="float64", name=name) for name, value in values.items()]
    optimizer = LARS(0.5, momentum=0.9, trust_coefficient=0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    momenta = {name: np.zeros_like(value) for name, value in values.items()}
    for _ in range(STEPS):
        gradients = {name: generator.normal(size=value.shape) for name, value in values.items()}
        optimizer.apply([tf.constant(gradient) for gradient in gradients.values()], variables)
        for name, gradient in gradients.items():
            norm, decay, rate = np.linalg.norm(values[name]), 0.0 if name == "bias" else 0.1, 1.0
            if name != "bias" and norm > 0:
                rate = 0.01 * norm / (np.linalg.norm(gradient) + decay * norm)
            momenta[name] = 0.9 * momenta[name] + 0.5 * rate * (gradient + decay * values[name])
            values[name] = values[name] - momenta[name]
    for variable, value in zip(variables, values.values(), strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-12, err_msg=variable.name)
    assert LARS.from_config(optimizer.get_config()).get_config() == optimizer.get_config()
