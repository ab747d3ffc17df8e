"""What README.md and the pages of docs/ show, run: their commands, and the files of examples/."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ringtrain.workloads import BUILT_IN
from tests.report.made_run import make_run
from tests.world.environments import install, make_environment
from tests.world.processes import REPOSITORY, Finished, MarkedProcess, clean_environment, run_command
from tests.world.running import events

EXAMPLES = REPOSITORY / "examples"
WORKLOADS = (REPOSITORY / "docs/workloads.md").read_text()
RUNNING = (REPOSITORY / "docs/running.md").read_text()


def shown_commands(page: str, word: str) -> list[str]:
    """A page's commands that hold a word, in their order, without their comments."""
    commands = [line.split("#")[0] for line in re.findall(r"^\$ (.*)$", page, re.MULTILINE)]
    return [command for command in commands if word in command]


def command_of(example: str) -> str:
    """How to start an example, as its first line says."""
    return (EXAMPLES / example).read_text().partition(": ")[2].partition("\n")[0]


def run(command: str, folder: Path) -> Finished:
    finished = run_command(shlex.split(command), env=clean_environment(), timeout=120, cwd=folder)
    assert finished.rc == 0, finished.stdout + finished.stderr
    return finished


def accuracies_in(finished: Finished) -> list[float]:
    return [float(value) for value in re.findall(r"accuracy = ([\d.]+)", finished.stdout)]


@pytest.mark.slow
def test_your_own_model(tmp_path: Path) -> None:
    initialise, train, verify, evaluate, report, export = shown_commands(WORKLOADS, "my_workload")
    run(initialise, tmp_path)
    written = (tmp_path / "my_workload.py").read_text()
    assert (EXAMPLES / "my_workload.py").read_text() == written
    assert train.startswith("horovodrun -np 2 python -m ringtrain --workload")
    assert accuracies_in(run(train, tmp_path))[-1] >= 0.99
    assert "is complete" in run(train, tmp_path).stdout
    assert "the world sizes train the same" in run(verify, tmp_path).stdout
    assert accuracies_in(run(evaluate, tmp_path))[-1] >= 0.99
    (tmp_path / "runs/my_workload/report.html").unlink()  # the run's own
    assert "the report of 1 run is in runs/my_workload/report.html" in run(report, tmp_path).stdout
    assert re.search(r">\s*Accuracy\s*<", (tmp_path / "runs/my_workload/report.html").read_text())
    [place] = re.findall(r"keras.saving.load_model\('(.*)'\)", run(export, tmp_path).stdout)
    load = f"import keras, sys; keras.saving.load_model({place!r}); assert 'ringtrain' not in sys.modules"
    run(f"python -c {shlex.quote(load)}", tmp_path)


def test_runs_compared(tmp_path: Path) -> None:
    [command] = shown_commands(RUNNING, "compared.html")
    for name in ("first", "second"):
        make_run(tmp_path / "runs" / name)
    run(command, tmp_path)
    assert "2 runs compared" in (tmp_path / "compared.html").read_text()


def test_the_workloads_are_those_that_the_command_lists() -> None:
    named = re.findall(
        r"^\| `(\w+)` \|", WORKLOADS.partition("## Built-in workloads")[2].partition("\n## ")[0], re.MULTILINE
    )
    assert sorted(named) == sorted(BUILT_IN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the examples, in which a run may leave its directory."""
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))


@pytest.mark.parametrize("example", ["line.py", pytest.param("pipeline.py", marks=pytest.mark.slow)])
def test_the_smallest_workload(folder: Path, example: str) -> None:
    losses = re.findall(r"\bstep \d+, loss = (\S+)", run(command_of(example), folder).stdout)
    assert float(losses[-1]) < 1e-6


@pytest.mark.slow
def test_a_loss_that_compares_samples(folder: Path) -> None:
    command = command_of("contrastive.py")
    losses = re.findall(r"\bstep \d+, loss = (\S+)", run(f"{command} --log_every 1", folder).stdout)
    assert float(losses[-1]) < 0.5 * float(losses[0])


@pytest.mark.slow
def test_tfrecord_files_with_your_own_features(folder: Path) -> None:
    subprocess.run([sys.executable, "features.py"], check=True, timeout=60, cwd=folder)
    losses = re.findall(r"eval loss = ([\d.]+)", run(command_of("features.py"), folder).stdout)
    assert float(losses[-1]) < 1


@pytest.mark.slow
def test_a_script_of_your_own(folder: Path) -> None:
    found = re.findall(r"{'accuracy': ([\d.]+)}", run(command_of("train_moons.py"), folder).stdout)
    assert len(found) == 2
    assert found[0] == found[1]


def test_a_script_with_horovods_interface(folder: Path) -> None:
    found = re.findall(r"\b\d (\[[\d.e-]+, [\d.]+\])", run(command_of("fit_digits.py"), folder).stdout)
    assert len(found) == 2
    assert found[0] == found[1]
    assert json.loads(found[0])[1] >= 0.9
    assert len(list(folder.glob("checkpoint-*.keras"))) == 10


@pytest.mark.slow
def test_a_resumable_fit(folder: Path) -> None:
    """Started again, it is complete, and the script goes on with the same weights."""
    said = [run(command_of("fit_kept.py"), folder).stdout for _ in range(2)]
    values = [re.findall(r"\{'accuracy': ([\d.]+), 'loss': [\d.e-]+\}", text) for text in said]
    assert len(values[0]) == 1
    assert values[0] == values[1]
    assert float(values[0][0]) >= 0.95
    assert "the run in runs/kept is complete" in said[1]
    assert (folder / "runs/kept/report.html").is_file()


@pytest.mark.slow
def test_records_through_grain_and_a_model_of_keras_hub(folder: Path, tmp_path: Path) -> None:
    python, _ = make_environment(tmp_path / "with-more", without="grain*")
    install(python, ".ci/locks/examples.lock")
    subprocess.run([python, "records.py"], check=True, timeout=60, cwd=folder)
    for example in ("records.py", "hub.py"):
        command = command_of(example).replace(" python ", f" {python} ")
        losses = re.findall(r"\bstep \d+, loss = (\S+)", run(command, folder).stdout)
        assert min(map(float, losses[-2:])) < 0.1, (example, losses)


READ_STUDY = """
import json, optuna
from optuna.storages.journal import JournalFileBackend
storage = optuna.storages.JournalStorage(JournalFileBackend("sweep/journal"))
trials = optuna.load_study(study_name="digits", storage=storage).trials
print(json.dumps([[trial.state.name, trial.value, trial.user_attrs] for trial in trials]))
"""


@pytest.mark.slow  # installs Optuna
@pytest.mark.timeout(900)
def test_the_trial_of_a_killed_worker_resumes(folder: Path, tmp_path: Path) -> None:
    python, _ = make_environment(tmp_path / "with-optuna", without="optuna*")
    install(python, ".ci/locks/examples.lock")
    workers: list[MarkedProcess] = []

    def start(name: str) -> MarkedProcess:
        with (tmp_path / f"{len(workers)}.log").open("wb") as log:
            command = [str(python), "tune_optuna.py", "sweep", name, "3"]
            workers.append(MarkedProcess(command, clean_environment(), cwd=folder, stdout=log, stderr=log))
        return workers[-1]

    def wait_for(is_there: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not is_there():
            assert time.monotonic() < end, [log.read_text() for log in sorted(tmp_path.glob("*.log"))]
            time.sleep(0.1)

    run = folder / "sweep/trial-0"
    try:
        killed = start("one")
        wait_for(run.exists)
        others = [start("two")]
        wait_for(lambda: bool(events(run, "checkpoint")))
        killed.popen.kill()
        others.append(start("one"))
        for worker in others:
            assert worker.popen.wait(600) == 0, [log.read_text() for log in sorted(tmp_path.glob("*.log"))]
        assert killed.wait_until_gone(10)
    finally:
        for worker in workers:
            worker.end()
    study = subprocess.run([python, "-c", READ_STUDY], check=True, timeout=60, cwd=folder, capture_output=True)
    trials = json.loads(study.stdout)
    assert sum(state == "COMPLETE" for state, *_ in trials) >= 3
    assert {state for state, *_ in trials} == {"COMPLETE", "FAIL"}
    assert trials[0][0] == "FAIL"
    [resumed] = [value for state, value, attributes in trials if attributes.get("first") == 0]
    assert resumed == max(event["accuracy"] for event in events(run, "eval"))
    first, second = (event["first_step"] for event in events(run, "start"))
    assert (first, second > 0) == (0, True)


@pytest.mark.slow
def test_elastic_training(folder: Path) -> None:
    hosts = folder / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    hosts.chmod(0o755)
    said = run(command_of("elastic.py"), folder).stdout
    assert len(re.findall(r"rank [01] of 2 begins at epoch 1, batch 1", said)) == 2, said
    assert len(re.findall(r"rank [01] of 2 is done: 640 steps", said)) == 2, said


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 1])
def test_any_function_in_parallel(folder: Path, num_ranks: int) -> None:
    command = command_of("polynomial.py")
    assert command.startswith("horovodrun -np 2 ")
    ended = run(command if num_ranks == 2 else command.removeprefix("horovodrun -np 2 "), folder).stdout
    found = re.findall(r"\b(\d) \[([-+.e \d]+)\]", ended)
    assert sorted(rank for rank, _ in found) == ["0", "1"][:num_ranks], ended
    for _, coefficients in found:
        np.testing.assert_allclose(np.fromstring(coefficients, sep=" "), [5, 0, 3], atol=0.05)
