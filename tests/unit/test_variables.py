"""By which names variables are kept, whatever Keras calls the optimizer that holds them."""

import keras
import numpy as np
import pytest

from ringtrain.run.variables import named_slots, number_twins, slots_that_begin_as_weights, without_optimizer_names


def built(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    optimizer.build([keras.Variable([1.0, 2.0], name=name) for name in ("kernel", "bias")])
    return optimizer


@pytest.mark.parametrize("name", [None, "mine"])
def test_slots_have_no_optimizer_s_name(name: str | None) -> None:
    names = [slot for slot, _ in named_slots(built(keras.optimizers.SGD(momentum=0.9, name=name)))]
    assert names == ["iteration", "learning_rate", "kernel_momentum", "bias_momentum"]


def test_numbered_keras_slots_have_equal_names_in_each_process() -> None:
    first, second = ([slot for slot, _ in named_slots(built(keras.optimizers.Nadam()))] for _ in range(2))
    assert first == second


def test_parts_of_an_optimizer_are_numbered_in_order() -> None:
    inner = keras.optimizers.SGD(momentum=0.9, name="inner")
    names = [slot for slot, _ in named_slots(built(keras.optimizers.LossScaleOptimizer(inner, name="outer")))]
    assert names.count("iteration") == 2
    assert {"step_counter", "dynamic_scale", "kernel_momentum"} <= set(names)
    assert number_twins(names).count("iteration#2") == 1


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["adam/iteration", "adam/w_momentum"], ["iteration", "w_momentum"]),
        (["iteration", "w_momentum"], ["iteration", "w_momentum"]),
        (["multi/iteration", "multi/adam/iteration", "multi/adam/w"], ["iteration", "iteration", "w"]),
        (["nadam/iteration", "variable_12"], ["iteration", "variable"]),
        (["variables_12", "a_iteration"], ["variables_12", "a_iteration"]),
    ],
)
def test_the_optimizer_s_name_precedes_iteration(paths: list[str], names: list[str]) -> None:
    assert without_optimizer_names(paths) == names


def test_slots_that_are_copies_of_the_weights_at_first_are_known() -> None:
    """They must follow the weights of another run (init_from)."""
    assert slots_that_begin_as_weights(built(keras.optimizers.Adam())) == []
    for name in {"ScheduleFreeAdamW"} & set(dir(keras.optimizers)):
        pairs = slots_that_begin_as_weights(built(getattr(keras.optimizers, name)()))
        assert [weight.name for weight, _ in pairs] == ["kernel", "bias"]
        for weight, slot in pairs:
            np.testing.assert_array_equal(slot.numpy(), weight.numpy())


def test_no_other_keras_optimizer_starts_with_weight_copies() -> None:
    for name, value in vars(keras.optimizers).items():
        if isinstance(value, type) and issubclass(value, keras.optimizers.Optimizer):
            if name in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "ScheduleFreeAdamW"):
                continue
            optimizer = built(value())
            copies = [v.path for v in optimizer.variables if v.shape == (2,) and np.array_equal(v.numpy(), [1.0, 2.0])]
            assert copies == [], name
