"""``ringtrain.train`` from a user's own script."""

from pathlib import Path

import pytest

from tests.world.conftest import RunRingtrain
from tests.world.running import events

SCRIPT = ["-m", "tests.world.workloads.script"]


def test_a_script_trains_on_all_ranks_and_gets_the_result(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    arguments = ["none", tmp_path / "run"]
    finished = run_ringtrain(arguments, launcher="mpirun", python=SCRIPT)
    assert finished.rc == 0, finished.stderr
    assert finished.stdout.count("<completed>") == 2
    assert events(tmp_path / "run", "start")[0]["size"] == 2
    end = events(tmp_path / "run")[-1]
    assert (end["event"], end["status"], end["exit_code"]) == ("end", "completed", 0)
    again = run_ringtrain(arguments, launcher="mpirun", python=SCRIPT)
    assert again.stdout.count("<None>") == 2, again.stdout + again.stderr


@pytest.mark.slow
def test_the_run_of_a_script_can_be_evaluated_by_the_command(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    """Its configuration names the class: here it has nothing to evaluate on, and that is the answer."""
    assert run_ringtrain(["none", tmp_path / "run"], python=SCRIPT).rc == 0
    workload = "tests.world.workloads.endings:Line"
    finished = run_ringtrain(["eval", tmp_path / "run"])
    assert (finished.rc, f"eval {tmp_path / 'run'} --workload {workload}" in finished.stderr) == (2, True)
    finished = run_ringtrain(["eval", tmp_path / "run", "--workload", workload])
    assert finished.rc == 2
    assert "'tests.world.workloads.endings:Line' has nothing to evaluate on" in finished.stderr


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param("setting", "there is no key epoch. Did you mean epochs?", marks=pytest.mark.slow),
        pytest.param("nested", "there is no key optimizer.learning_rate.", marks=pytest.mark.slow),
        pytest.param("type", "epochs is '1.5'; it must be a whole number.", marks=pytest.mark.slow),
        pytest.param("value", "epochs is 0; it must be at least 1.", marks=pytest.mark.slow),
        pytest.param("option", "the workload has no option 'nonsense'.", marks=pytest.mark.slow),
        ("late", "ringtrain.train was called when TensorFlow had computed something already"),
    ],
)
def test_a_wrong_call_gives_one_line_and_the_exit_code(
    run_ringtrain: RunRingtrain, tmp_path: Path, fault: str, message: str
) -> None:
    finished = run_ringtrain([fault, tmp_path / "run"], launcher="mpirun", python=SCRIPT, timeout=60)
    assert finished.rc == 2, finished.stdout + finished.stderr
    assert finished.stderr.count(message) == 1
    assert "Traceback" not in finished.stderr
