"""Commands replace files of their own kind only."""

import dataclasses
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

import launch.cli
import ringtrain.cli
from ringtrain.commands import audit
from ringtrain.errors import UsageError
from ringtrain.files.outputs import require_same_kind
from ringtrain.run.directory import create_run_directory
from tests.faults.images import make_images
from tests.report.made_run import make_run

RECORDED = Path(__file__).parents[1] / "world/recorded/run"

MARK = b"#SBATCH"


def test_a_new_file_and_one_of_the_same_kind_may_be_written(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    require_same_kind(path, MARK, kind="a batch script")
    path.touch()
    require_same_kind(path, MARK, kind="a batch script")
    path.write_bytes(b"#!/bin/bash\n#SBATCH --nodes=2\n")
    require_same_kind(path, MARK, kind="a batch script")


@pytest.mark.parametrize("what", ["another file", "link", "link to nothing", "pipe", "directory", "device"])
@pytest.mark.timeout(20)
def test_anything_else_is_refused_and_left(what: str, tmp_path: Path) -> None:
    path, same = tmp_path / "out", tmp_path / "same"
    same.write_bytes(MARK)
    match what:
        case "another file":
            path.write_bytes(b"import keras\n")
        case "link":
            path.symlink_to(same)
        case "link to nothing":
            path.symlink_to(tmp_path / "nothing")
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "device":
            path = Path(os.devnull)
    with pytest.raises(UsageError, match="which exists and is not a batch script; it is left unchanged"):
        require_same_kind(path, MARK, kind="a batch script")
    assert same.read_bytes() == MARK
    if what == "another file":
        assert path.read_bytes() == b"import keras\n"
    else:
        assert not path.is_file() or path.is_symlink()


# --- All commands ---

FOREIGN_FILES = {
    "a program": b"import keras\n",
    "a page": b"<!doctype html><title>mine</title>",
    "a batch script": b"#!/bin/bash\n#SBATCH --nodes=2\nmake\n",
    "JSON": b'{"passes": true, "mine": 1}',
    "TFRecords": bytes(16),
}


class Output(NamedTuple):
    """How a command is given one of its outputs."""

    main: Callable[[Sequence[str]], int]
    words: list[str]  # the path follows
    name: str = ""  # of the file to be written, within a directory that is given
    can_replace: bool = True  # an output of its own
    is_quick: bool = True  # it writes a new one without a training
    suffix: str = ""


def open_run_directory(words: Sequence[str]) -> int:
    """As ``train --out``, which would start TensorFlow's threads again in this process."""
    try:
        create_run_directory(Path(*words))
    except UsageError as error:
        print(f"ringtrain: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


RENDER = ["slurm", "render", "--nodes", "2", "--ranks_per_node", "1", "--mpi", "pmix", "--to"]
OUTPUTS: dict[str, Output] = {
    "report output": Output(ringtrain.cli.main, ["report", "run", "--output"]),
    "slurm render to": Output(launch.cli.main, RENDER),
    "init file": Output(ringtrain.cli.main, ["init"], can_replace=False, suffix=".py"),
    "export output": Output(
        ringtrain.cli.main, ["export", "trained", "--output"], can_replace=False, is_quick=False, suffix=".keras"
    ),
    "convert destination": Output(ringtrain.cli.main, ["convert", "images"], can_replace=False, is_quick=False),
    "convert destination, a directory": Output(
        ringtrain.cli.main, ["convert", "images"], "mine.txt", can_replace=False, is_quick=False
    ),
    "train out": Output(open_run_directory, [], is_quick=False),
    "train out, a directory": Output(open_run_directory, [], "report.html", is_quick=False),
    "verify --script out, the page": Output(
        ringtrain.cli.main, ["verify", "--script", "script.py", "--out"], "index.html", is_quick=False
    ),
    "verify --script out, the verdict": Output(
        ringtrain.cli.main, ["verify", "--script", "script.py", "--out"], "verdict.json", is_quick=False
    ),
}
NAMES_OF_OUTPUTS = {"out", "output", "to", "file", "destination"}
# Of stores and trackers; and a setting that verify passes to no run.
NO_FILES = {"track to", "verify out"}


def directory_with_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what the commands of ``OUTPUTS`` read, and go there."""
    make_run(path / "run")
    shutil.copytree(RECORDED, path / "trained")
    make_images(path / "images")
    (path / "script.py").write_text("print('mine')\n")
    monkeypatch.chdir(path)


def contents_below(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("kind", FOREIGN_FILES)
@pytest.mark.parametrize("output", OUTPUTS)
def test_no_command_replaces_a_file_that_is_not_its_own(
    output: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory_with_runs(tmp_path, monkeypatch)
    its = OUTPUTS[output]
    target = Path(f"mine{its.suffix}")
    file = target / its.name if its.name else target
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(FOREIGN_FILES[kind])
    before = contents_below(tmp_path)
    assert its.main([*its.words, str(target)]) == 2
    assert capsys.readouterr().err.startswith(("ringtrain: error: ", "launch: error: "))
    assert contents_below(tmp_path) == before
    assert sorted(path.name for path in file.parent.glob(".*")) == []


@pytest.mark.parametrize("output", [name for name, its in OUTPUTS.items() if its.is_quick])
def test_a_command_may_replace_its_own_file(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory_with_runs(tmp_path, monkeypatch)
    its = OUTPUTS[output]
    for expected in (0, 0 if its.can_replace else 2):
        assert its.main([*its.words, f"new{its.suffix}"]) == expected
    assert its.main([*its.words, os.devnull]) == 2
    assert Path(os.devnull).is_char_device()


def test_all_commands_with_an_output_are_tried() -> None:
    """An option whose name says that it is written must be in ``OUTPUTS``."""
    options_of = {
        name: importlib.import_module(module).Options
        for name, module in ringtrain.cli.COMMANDS.items()
        if hasattr(importlib.import_module(module), "Options")
    }
    options_of["verify --script"] = audit.Options
    found = set()
    for command, options in options_of.items():
        for field in dataclasses.fields(options):
            if field.name in NAMES_OF_OUTPUTS:
                found.add(f"{command} {field.name}")
    assert found - NO_FILES == {name.partition(",")[0] for name in OUTPUTS} - {"slurm render to"}
