"""``ringtrain.train`` from a user's own script."""

from pathlib import Path

import pytest

from tests.world.conftest import RunRingtrain
from tests.world.running import digest, events, final_checkpoint

SCRIPT = ["-m", "tests.world.workloads.script"]
SEVERAL = ["-m", "tests.world.workloads.several"]


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


@pytest.mark.parametrize(
    ("size", "backend"),
    [
        (1, "auto"),
        (2, "horovod"),
        (3, "native"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, "horovod"), (2, "native"), (3, "horovod")]),
    ],
)
def test_runs_of_one_process_train_what_each_would_train_alone(
    run_ringtrain: RunRingtrain, tmp_path: Path, size: int, backend: str
) -> None:
    """Also after runs that failed; with the names of layers that another process can resume."""
    launcher = "mpirun" if size > 1 else None
    several, alone = tmp_path / "several", tmp_path / "alone"
    finished = run_ringtrain(["folds", several, backend], launcher=launcher, np=size, python=SEVERAL)
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("<exit codes [4, 2, 2]>") == size
    assert finished.stdout.count("<fold 1: 15 samples>") == size
    assert "best_metric is 'f1'" in finished.stderr
    only = run_ringtrain(["only fold 1", alone, backend], launcher=launcher, np=size, python=SEVERAL)
    assert only.rc == 0, only.stdout + only.stderr
    assert digest(final_checkpoint(several / "fold1", 6)) == digest(final_checkpoint(alone / "fold1", 6))
    ends = [events(several / name, "end")[-1]["status"] for name in ("fold0", "diverging", "fold1")]
    assert ends == ["completed", "diverged", "completed"]


def test_a_rank_that_fails_between_two_runs_ends_the_others(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    arguments = ["one rank fails", tmp_path, "native"]
    finished = run_ringtrain(arguments, launcher="mpirun", python=SEVERAL, timeout=60)
    assert finished.rc == 1, finished.stdout + finished.stderr
    assert "ZeroDivisionError: between the runs" in finished.stderr


@pytest.mark.parametrize("backend", ["native", pytest.param("horovod", marks=pytest.mark.slow)])
def test_a_rank_that_goes_on_after_its_runs_has_all_its_time(
    run_ringtrain: RunRingtrain, tmp_path: Path, backend: str
) -> None:
    finished = run_ringtrain(["rank 0 goes on", tmp_path, backend], launcher="mpirun", python=SEVERAL)
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert "<rank 0 has gone on>" in finished.stdout
    assert "is still there" not in finished.stderr


@pytest.mark.cold  # it checks how the interpreter exits
@pytest.mark.parametrize("backend", ["native", pytest.param("horovod", marks=pytest.mark.slow)])
def test_a_rank_that_a_thread_keeps_lets_the_others_exit(
    run_ringtrain: RunRingtrain, tmp_path: Path, backend: str
) -> None:
    finished = run_ringtrain(["rank 0 is kept", tmp_path, backend], launcher="mpirun", python=SEVERAL, timeout=60)
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert "is still there 1 s after its program has ended, kept by the thread 'monitor'" in finished.stderr


def test_another_backend_in_a_later_run_is_refused(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    finished = run_ringtrain(["other backend", tmp_path, "native"], launcher="mpirun", python=SEVERAL)
    assert finished.rc == 2, finished.stdout + finished.stderr
    assert finished.stderr.count("Set the same backend for all runs of a script.") == 1
