"""What earlier versions had is answered by one line that says what to use."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import ringtrain
from ringtrain import cli
from ringtrain.commands.parser import parse_arguments, parse_mapping
from ringtrain.commands.preparing import Settings
from ringtrain.config import Config, make_config
from ringtrain.errors import UsageError
from ringtrain.messages.removed import COMMANDS, FLAGS_OF_COMMANDS, NAMES, SETTINGS
from ringtrain.run.resume import list_changed_settings, refuse_other_settings
from ringtrain.runtime.world import read_world

ALONE = read_world({})
OTHER_VALUES = {"on_bad_sample": "skip", "cache": "node"}


def test_each_removed_setting_has_another_value_here() -> None:
    assert OTHER_VALUES.keys() == SETTINGS.keys()
    assert not SETTINGS.keys() & Config.__dataclass_fields__.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_removed_flag_is_answered(name: str) -> None:
    for value in (OTHER_VALUES[name], SETTINGS[name].default):
        with pytest.raises(UsageError) as caught:
            parse_arguments(Settings, [f"--{name}", value], ALONE)
        assert str(caught.value) == f"--{name} was removed. {SETTINGS[name].instead}"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_removed_setting_of_a_script_or_a_workload_is_answered(name: str) -> None:
    with pytest.raises(UsageError, match=f"the setting {name} was removed"):
        parse_mapping(Config, {name: OTHER_VALUES[name]})
    with pytest.raises(UsageError, match=f"the setting {name} in the workload's defaults was removed"):
        make_config({}, {name: OTHER_VALUES[name]})


def write_settings(file: Path, **values: Any) -> None:
    file.write_text(yaml.safe_dump({"epochs": 3, **values}))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_file_of_settings_may_have_the_default_of_a_removed_one(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    write_settings(file, **{name: SETTINGS[name].default})
    assert parse_arguments(Settings, ["--config", str(file)], ALONE) == {"epochs": 3}
    write_settings(file, **{name: OTHER_VALUES[name]})
    with pytest.raises(UsageError) as caught:
        parse_arguments(Settings, ["--config", str(file)], ALONE)
    assert str(caught.value).startswith(f"{file} has {name}: {OTHER_VALUES[name]}, and that setting was removed.")
    assert str(caught.value).endswith(f"Then remove the line from {file}.")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_that_had_a_removed_setting_goes_on_if_it_was_at_its_default(name: str, tmp_path: Path) -> None:
    settings = {"optimizer": {"lr": 0.01}}
    refuse_other_settings(tmp_path, settings | {name: SETTINGS[name].default}, settings)
    with pytest.raises(UsageError, match=rf"config\.yaml has {name}: {OTHER_VALUES[name]}, and that setting"):
        refuse_other_settings(tmp_path, settings | {name: OTHER_VALUES[name]}, settings)
    assert list_changed_settings(settings | {name: OTHER_VALUES[name]}, settings) == []


def test_a_removed_command_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    for name, instead in COMMANDS.items():
        assert cli.main([name, "runs/digits"]) == 2
        assert f"the command {name!r} was removed. {instead}" in capsys.readouterr().err


def test_a_removed_flag_of_a_command_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    for name, instead in FLAGS_OF_COMMANDS.items():
        assert cli.main(["report", "runs/digits", f"--{name}", "x.json"]) == 2
        assert f"--{name} was removed. {instead}" in capsys.readouterr().err


def test_a_removed_name_is_answered() -> None:
    for name, instead in NAMES.items():
        with pytest.raises(AttributeError, match=f"ringtrain.{name} was removed"):
            getattr(ringtrain, name)
        assert name not in ringtrain.__all__
        assert instead.endswith(".")
