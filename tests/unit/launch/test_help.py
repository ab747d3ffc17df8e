"""The screens of ``python -m launch``, and what a misspelt word meets."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import main

COMMANDS = [[], ["local"], ["slurm"], ["slurm", "render"], ["slurm", "submit"], ["slurm", "status"]]


def exit_code_of(arguments: list[str]) -> object:
    """What the command returns, or exits with."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_a_terminal_and_has_an_example(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert exit_code_of([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    _, _, examples = text.partition("example")
    assert f"  {' '.join(['python -m launch', *command])} " in examples


def test_neither_help_nor_the_end_of_a_job_imports_tensorflow_or_numpy() -> None:
    script = """
import sys
from pathlib import Path
import launch.slurm.after
from launch.cli import main
main(["--help"])
print(sorted({"tensorflow", "keras", "numpy", "jinja2"} & set(sys.modules)))
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["locl"], "Did you mean 'local'?"),
        (["slurm", "rendr"], "Did you mean 'render'?"),
        (["local", "-np", "2", "--max_restart", "3"], "Did you mean --max_restarts?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_typing_error_gives_a_suggestion(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert expected in capsys.readouterr().err


def test_ringtrain_has_it_as_a_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ringtrain", "launch", "locl"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert finished.returncode == 2
    assert (
        finished.stderr == "launch: error: there is no command 'locl'. Did you mean 'local'? Commands: local, slurm.\n"
    )
