"""The configuration: every rule, and whose value wins."""

import dataclasses
import inspect
import math
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ringtrain import config as config_module
from ringtrain.config import OPTIMIZER_CLASSES, Config, OptimizerConfig, make_config, to_plain
from ringtrain.errors import UsageError
from ringtrain.step.optimizers import LARS
from ringtrain.training.creation import create_optimizer


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "epochs is 0; it must be at least 1"),
        ({"steps": -1}, "steps is -1; it must be at least 1"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"global_batch_size": 0}, "global_batch_size is 0; it must be at least 1"),
        ({"log_every": 0}, "log_every is 0; it must be at least 1"),
        ({"accumulate": 0}, "accumulate is 0; it must be at least 1"),
        ({"eval_every_epochs": -1}, "eval_every_epochs is -1; it must be at least 0"),
        ({"eval_every": -1}, "eval_every is -1; it must be at least 0"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"batch_size": 8, "global_batch_size": 16}, "batch_size is 8 and global_batch_size is 16; give one"),
        (
            {"backend": "horovod", "compression": "bf16"},
            "backend 'horovod', which has no bfloat16. Use --compression fp16",
        ),
        ({"epochs": 2, "steps": 100}, "epochs is 2 and steps is 100; give one"),
        ({"backend": "nccl"}, "backend is 'nccl'; it must be one of auto, native, horovod, solo"),
        ({"compression": "int8"}, "compression is 'int8'; it must be one of none, fp16, bf16"),
        ({"precision": "float16"}, "precision is 'float16'; it must be one of float32, mixed_float16, mixed_bfloat16"),
        ({"hang_timeout": 0.5}, "hang_timeout is 0.5; it must be at least 1 second, or 0 for no watch"),
        ({"hang_timeout": -1}, "hang_timeout is -1; it must be at least 1 second"),
        ({"hang_timeout": math.inf}, "hang_timeout is inf; it must be at least 1 second"),
        ({"hang_timeout": 1e30}, "hang_timeout is 1e+30; it must be at most 1,000,000,000"),
        ({"hang_timeout": math.nan}, "hang_timeout is nan; it must be at least 1 second"),
        ({"max_hours": math.inf}, "max_hours is inf; it must be a finite number, greater than 0"),
        ({"max_hours": 1e30}, "max_hours is 1e+30; it must be at most 277778"),
        ({"steps": 10**30}, f"steps is {10**30}; it must be at most 999,999,999"),
        ({"epochs": 10**100}, f"epochs is {str(10**100)[:80]}... (101 characters); it must be at most 999,999,999"),
        ({"batch_size": 10**30}, f"batch_size is {10**30}; it must be at most 2,147,483,647"),
        ({"keep": 10**30}, f"keep is {10**30}; it must be at most 2,147,483,647"),
        ({"seed": 2**32}, "seed is 4294967296; it must be at most 4,294,967,295"),
        ({"out": Path("a\0b")}, r"out is 'a\x00b', which is not UTF-8 text without control characters"),
        ({"out": Path("a\nb")}, r"out is 'a\nb', which is not UTF-8 text without control characters"),
        ({"workload": "a\nb.py:W"}, r"workload is 'a\nb.py:W', which is not UTF-8 text"),
        ({"data_dir": Path("a\tb")}, r"data_dir is 'a\tb', which is not UTF-8 text"),
        ({"out": Path("a\u202eb")}, r"out is 'a\u202eb', which is not UTF-8 text"),
        ({"epochs": np.float32(1.5)}, "epochs is 1.5; it must be a whole number"),
        ({"epochs": "3"}, "epochs is '3'; it must be a whole number"),
        ({"epochs": True}, "epochs is True; it must be a whole number"),
        ({"out": "runs/x"}, "out is 'runs/x'; it must be a path"),
        ({"deterministic": 1}, "deterministic is 1; it must be true or false"),
        ({"seed": None}, "seed is None; it must be a whole number"),
        ({"profile": "10"}, "profile is '10'; it must be START:STOP, two steps from 1 on, such as 100:110"),
        ({"profile": "0:5"}, "profile is '0:5'; it must be START:STOP"),
        ({"profile": "9:8"}, "profile is '9:8'; it must be START:STOP"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite is 'ignore'; it must be one of stop, skip"),
        ({"data_dir": Path("/no/such/place")}, "data_dir '/no/such/place' is no directory"),
        # of the optimizer
        ({"name": "sdg"}, "optimizer.name is 'sdg'; it must be one of sgd, adam"),
        ({"lr_scale": "log"}, "optimizer.lr_scale is 'log'; it must be one of none, linear, sqrt"),
        ({"schedule": "step"}, "optimizer.schedule is 'step'; it must be one of constant, exponential, cosine"),
        ({"lr": 0.0}, "optimizer.lr is 0.0; it must be greater than 0"),
        ({"lr": math.nan}, "optimizer.lr is nan; it must be a finite number, greater than 0"),
        ({"lr": math.inf}, "optimizer.lr is inf; it must be a finite number, greater than 0"),
        ({"lr": 1e39}, "optimizer.lr is 1e+39; it must be at most 3e+38"),
        ({"lr": "fast"}, "optimizer.lr is 'fast'; it must be a number"),
        ({"momentum": 1.5}, "optimizer.momentum is 1.5; it must be below 1, such as 0.9"),
        ({"name": "rmsprop", "rho": 1.5}, "optimizer.rho is 1.5; it must be below 1, such as 0.9"),
        ({"decay_rate": -1.0}, "optimizer.decay_rate is -1.0; it must be greater than 0"),
        ({"decay_epochs": 0.0}, "optimizer.decay_epochs is 0.0; it must be greater than 0"),
        ({"warmup_epochs": -1.0}, "optimizer.warmup_epochs is -1.0; it must be at least 0"),
        ({"momentum": -0.1}, "optimizer.momentum is -0.1; it must be at least 0"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay is -0.1; it must be at least 0"),
        ({"clip_global_norm": math.inf}, "optimizer.clip_global_norm is inf; it must be a finite number"),
        ({"name": "adam", "momentum": 0.9}, "optimizer.momentum is 0.9, but adam takes none"),
        ({"name": "adam", "rho": 0.9}, "optimizer.rho is 0.9, but adam takes none; leave it out, or"),
        ({"name": "rmsprop", "epsilon": 0.0}, "optimizer.epsilon is 0.0; it must be greater than 0"),
        ({"nesterov": True}, "optimizer.nesterov is true, but only sgd with optimizer.momentum above 0"),
        ({"name": "rmsprop", "momentum": 0.9, "nesterov": True}, "optimizer.nesterov is true"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_the_rule(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        OptimizerConfig(**values) if message.startswith("optimizer.") else Config(**values)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().epochs = 3  # type: ignore[misc]


def test_values_of_the_user_then_the_workload_override_defaults() -> None:
    workload = {"epochs": 7, "log_every": 5, "optimizer": {"name": "adam", "lr": 0.5}}
    config = make_config({"epochs": 2, "optimizer": {"lr": 0.25}}, workload)
    assert (config.epochs, config.log_every, config.seed) == (2, 5, 0)
    assert config.optimizer == OptimizerConfig(name="adam", lr=0.25)


@pytest.mark.parametrize(
    ("explicit", "workload", "kept"),
    [
        ({"steps": 9}, {"epochs": 3}, {"steps": 9, "epochs": None}),
        ({"epochs": 9}, {"steps": 3}, {"steps": None, "epochs": 9}),
        ({"global_batch_size": 9}, {"batch_size": 3}, {"global_batch_size": 9, "batch_size": None}),
        ({"batch_size": 9}, {"global_batch_size": 3}, {"global_batch_size": None, "batch_size": 9}),
    ],
)
def test_the_user_wins_between_mutually_exclusive_settings(
    explicit: dict[str, Any], workload: dict[str, Any], kept: dict[str, Any]
) -> None:
    config = make_config(explicit, workload)
    assert {name: getattr(config, name) for name in kept} == kept


def test_the_user_may_not_give_both() -> None:
    with pytest.raises(UsageError, match="give one of the two"):
        make_config({"steps": 9, "epochs": 2}, {"epochs": 3})


def test_the_workload_s_own_settings_are_left_as_they_are() -> None:
    workload = {"epochs": 7, "optimizer": {"lr": 0.5}}
    make_config({"steps": 1, "optimizer": {"lr": 0.1}}, workload)
    assert workload == {"epochs": 7, "optimizer": {"lr": 0.5}}


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"epoch": 3}, "the workload's defaults have 'epoch', but there is no such setting. Did you mean 'epochs'?"),
        ({"optimizer": {"rate": 3}}, "the workload's defaults have 'optimizer.rate', but there is no such setting."),
        ({"optimizer": "adam"}, "the workload's defaults have optimizer 'adam'; it must be a mapping."),
        ({"epochs": "3"}, "epochs is '3'; it must be a whole number"),
    ],
)
def test_a_workload_s_defaults_are_settings(defaults: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        make_config({}, defaults)


def test_a_workload_s_default_paths_may_be_texts() -> None:
    assert make_config({}, {"out": "~/runs"}).out == Path.home() / "runs"


def test_options_must_be_declared_and_have_the_declared_type() -> None:
    declared = {"width": 64, "rate": 0.5, "size": None, "flag": False}
    config = make_config({"options": {"rate": 1, "size": 75}}, {}, declared)
    assert config.options == {"width": 64, "rate": 1.0, "size": 75, "flag": False}
    assert isinstance(config.options["rate"], float)
    assert declared["size"] is None
    for options, message in (
        (
            {"widht": 3},
            "the workload has no option 'widht'. Did you mean 'width'? Its options: flag, rate, size, width.",
        ),
        ({"width": 1.5}, "options.width is 1.5; it must be a whole number, such as 64."),
        ({"width": True}, "options.width is True; it must be a whole number"),
        ({"flag": 1}, "options.flag is 1; it must be true or false"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            make_config({"options": options}, {}, declared)


def test_options_of_an_unimported_workload_are_kept_unchanged() -> None:
    assert make_config({"options": {"any": 1}}, {}).options == {"any": 1}


def test_settings_become_plain_values(tmp_path: Path) -> None:
    plain = to_plain(dataclasses.asdict(Config(data_dir=tmp_path, out=Path("runs/a"))))
    assert (plain["data_dir"], plain["out"], plain["optimizer"]["name"]) == (str(tmp_path), "runs/a", "sgd")


def class_of(name: str) -> Any:
    """Keras' class of an optimizer, or ringtrain's own."""
    return LARS if name == "lars" else getattr(keras.optimizers, OPTIMIZER_CLASSES[name])


@pytest.mark.parametrize("name", OPTIMIZER_CLASSES)
def test_every_optimizer_can_be_made_from_its_settings(name: str) -> None:
    momentum = 0.5 if name in config_module.MOMENTUM_OPTIMIZERS else 0.0
    settings = OptimizerConfig(name=name, lr=0.25, weight_decay=0.125, clip_global_norm=2.0, momentum=momentum)
    optimizer = create_optimizer(settings)
    made = optimizer.get_config()
    assert isinstance(optimizer, class_of(name))
    assert isinstance(optimizer, keras.optimizers.Optimizer)
    assert (made["learning_rate"], made["weight_decay"], made["global_clipnorm"]) == (0.25, 0.125, 2.0)
    assert made.get("momentum", 0.5) == 0.5


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("rho", config_module.RHO_OPTIMIZERS),
        ("epsilon", config_module.EPSILON_OPTIMIZERS),
        ("trust_coefficient", ("lars",)),
    ],
)
def test_a_setting_is_for_just_those_optimizers_that_take_it(setting: str, names: tuple[str, ...]) -> None:
    for name in OPTIMIZER_CLASSES:
        parameters = inspect.signature(class_of(name)).parameters
        # Adafactor has two epsilons, of other names.
        assert (name in names) == (setting in parameters), name
        if name in names:
            values: dict[str, Any] = {"name": name, setting: 0.5}
            optimizer = create_optimizer(OptimizerConfig(**values))
            assert optimizer.get_config()[setting] == 0.5


def test_words_exclude_weights_from_weight_decay() -> None:
    settings = OptimizerConfig(name="adamw", weight_decay=0.1, exclude="bias, gamma,")
    assert settings.excluded_words == ["bias", "gamma"]
    optimizer = create_optimizer(settings)
    weights = [keras.Variable([1.0], name=name) for name in ("kernel", "bias", "gamma")]
    optimizer.build(weights)
    assert [optimizer._use_weight_decay(weight) for weight in weights] == [True, False, False]


def test_numbers_of_numpy_are_numbers() -> None:
    values: dict[str, Any] = {"epochs": np.int64(3), "hang_timeout": np.float32(5.0), "deterministic": np.bool_(True)}
    config = Config(**values)
    assert [type(value) for value in (config.epochs, config.hang_timeout, config.deterministic)] == [int, float, bool]
