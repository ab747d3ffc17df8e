"""What the README shows, cut out of it and run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from ringtrain.workloads import BUILT_IN
from tests.report.made_run import make_run
from tests.world.processes import REPOSITORY, Finished, clean_environment, run_command

README = (REPOSITORY / "README.md").read_text()


def cut_out(name: str, folder: Path) -> Path:
    """Write the README's listing that begins with ``# NAME``, and give its path."""
    [listing] = re.findall(rf"^```python\n(# {re.escape(name)}\b.*?)^```$", README, re.MULTILINE | re.DOTALL)
    path = folder / name
    path.write_text(listing)
    return path


def shown_commands(word: str) -> list[str]:
    """The README's commands that hold a word in small or capital letters, in their order, without their comments."""
    commands = [line.split("#")[0] for line in re.findall(r"^\$ (.*)$", README, re.MULTILINE)]
    return [command for command in commands if word in command.lower()]


def run(command: str, folder: Path) -> Finished:
    finished = run_command(shlex.split(command), env=clean_environment(), timeout=120, cwd=folder)
    assert finished.rc == 0, finished.stdout + finished.stderr
    return finished


def accuracies_in(finished: Finished) -> list[float]:
    return [float(value) for value in re.findall(r"accuracy = ([\d.]+)", finished.stdout)]


def test_your_own_model(tmp_path: Path) -> None:
    initialise, train, verify, evaluate, report, export = shown_commands("my_workload")
    run(initialise, tmp_path)
    written = (tmp_path / "my_workload.py").read_text()
    assert cut_out("my_workload.py", tmp_path).read_text() == written
    assert train.startswith("horovodrun -np 2 python -m ringtrain --workload")
    assert accuracies_in(run(train, tmp_path))[-1] >= 0.99
    assert "is complete" in run(train, tmp_path).stdout
    assert "the world sizes train the same" in run(verify, tmp_path).stdout
    assert accuracies_in(run(evaluate, tmp_path))[-1] >= 0.99
    (tmp_path / "runs/my_workload/report.html").unlink()  # the run's own
    assert "the report of 1 run is in runs/my_workload/report.html" in run(report, tmp_path).stdout
    assert "Accuracy there" in (tmp_path / "runs/my_workload/report.html").read_text()
    [place] = re.findall(r"keras.saving.load_model\('(.*)'\)", run(export, tmp_path).stdout)
    load = f"import keras, sys; keras.saving.load_model({place!r}); assert 'ringtrain' not in sys.modules"
    run(f"python -c {shlex.quote(load)}", tmp_path)


def test_runs_compared(tmp_path: Path) -> None:
    [command] = shown_commands("compared.html")
    for name in ("first", "second"):
        make_run(tmp_path / "runs" / name)
    run(command, tmp_path)
    assert "2 runs compared" in (tmp_path / "compared.html").read_text()


def test_the_workloads_are_those_that_the_command_lists() -> None:
    named = re.findall(
        r"^\| `(\w+)` \|", README.partition("## What is built in")[2].partition("\n## ")[0], re.MULTILINE
    )
    assert sorted(named) == sorted(BUILT_IN)


def test_a_script_of_your_own(tmp_path: Path) -> None:
    cut_out("my_workload.py", tmp_path)
    script = cut_out("train_moons.py", tmp_path)
    found = re.findall(r"{'accuracy': ([\d.]+)}", run(f"horovodrun -np 2 python {script.name}", tmp_path).stdout)
    assert len(found) == 2
    assert found[0] == found[1]


@pytest.mark.parametrize("start", ["horovodrun -np 2", ""])
def test_any_function_in_parallel(tmp_path: Path, start: str) -> None:
    script = cut_out("polynomial.py", tmp_path)
    ended = run(f"{start} python {script.name}", tmp_path).stdout
    found = re.findall(r"\b(\d) \[([-+.e \d]+)\]", ended)
    assert sorted(rank for rank, _ in found) == (["0", "1"] if start else ["0"]), ended
    for _, coefficients in found:
        np.testing.assert_allclose(np.fromstring(coefficients, sep=" "), [5, 0, 3], atol=0.05)
