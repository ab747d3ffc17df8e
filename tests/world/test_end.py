"""The end of a process: nothing that the user's code has left running keeps it, and its exit code is what it earned."""

import re
import signal
import socket
from pathlib import Path

import pytest

from tests.world.conftest import RunRingtrain
from tests.world.processes import REPOSITORY
from tests.world.running import STAYING, events, running

pytestmark = pytest.mark.cold  # these tests check how the interpreter exits

KEEPING = REPOSITORY / "tests/world/workloads/keeping.py"
NODE = re.escape(socket.gethostname())
PLACE = rf"\(in wait_for_ever, {re.escape(str(KEEPING))}:\d+\)"
KEEPERS = {
    "thread": rf"the thread 'uploader' {PLACE}",
    "pool": rf"the thread 'reader_0' {PLACE}",
    "atexit": rf"what runs at exit {PLACE}",
    "child": r"the child process \d+ \(decoder: \S*python\S* .*\)",
}
UNNAMED = ("destructor", "atexit in C")  # nothing of Python's can run, and name it


def kept_by(how: str, rank: int = 0, *, code: int = 0) -> str:
    """The line of a rank that something has kept."""
    return (
        rf"ringtrain: warning: rank {rank} on {NODE} \(pid \d+\) is still there 1 s after its program has ended, kept "
        rf"by {KEEPERS[how]}\. It leaves with exit code {code}\."
    )


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[] if how == "atexit" else pytest.mark.slow) for how in (*KEEPERS, *UNNAMED)]
)
def test_what_blocks_the_exit_of_a_run_is_named_and_abandoned(
    how: str, run_ringtrain: RunRingtrain, tmp_path: Path
) -> None:
    env = {"RINGTRAIN_TEST_KEEP": how, "RINGTRAIN_TEST_KEEP_RANK": "0"}
    arguments = ["--workload", f"{KEEPING}:Keeping", "--out", tmp_path / "run", "--exit_timeout", "1"]
    finished = run_ringtrain(arguments, env=env, timeout=60)
    assert finished.rc == 0, finished.stderr
    assert how in UNNAMED or re.search(kept_by(how), finished.stderr), finished.stderr
    assert "done" in finished.stdout
    assert events(tmp_path / "run")[-1]["status"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "how"), [("mpirun", "thread"), ("mpirun", "child"), ("launch", "child")])
def test_a_rank_that_something_keeps_holds_up_no_launcher(
    launcher: str, how: str, run_ringtrain: RunRingtrain, tmp_path: Path
) -> None:
    arguments = ["--workload", f"{KEEPING}:Keeping", "--out", tmp_path / "run", "--exit_timeout", "1"]
    env = {"RINGTRAIN_TEST_KEEP": how}
    if launcher == "launch":
        start = ["-m", "launch", "local", "-np", "2", "--"]
        finished = run_ringtrain(arguments, env=env, python=start, timeout=60)
    else:
        finished = run_ringtrain(arguments, env=env, launcher=launcher, timeout=60)
    assert finished.rc == 0, finished.stderr
    assert re.search(kept_by(how, 1), finished.stderr), finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo", "launch"])
def test_a_process_that_outlives_its_rank_holds_up_no_launcher(
    launcher: str, run_ringtrain: RunRingtrain, tmp_path: Path
) -> None:
    arguments = ["--workload", f"{KEEPING}:Keeping", "--out", tmp_path / "run", "--exit_timeout", "1"]
    env = {"RINGTRAIN_TEST_KEEP": "detached"}
    if launcher == "launch":
        start = ["-m", "launch", "local", "-np", "2", "--"]
        finished = run_ringtrain(arguments, env=env, python=start, timeout=60)
    else:
        finished = run_ringtrain(arguments, env=env, launcher=launcher, timeout=60)
    assert finished.rc == 0, finished.stderr


@pytest.mark.slow
def test_a_stopped_run_with_a_blocked_exit_exits_with_75(tmp_path: Path) -> None:
    env = {"RINGTRAIN_TEST_STEP_SECONDS": "0.05"}
    with running(tmp_path / "run", "--exit_timeout", "1", np=1, env=env, workload=f"{STAYING}:LastingThread") as run:
        run.wait_for_step(2)
        run.signal_launcher(signal.SIGTERM)
        assert run.wait(30) == 75, run.text()
    assert "exit code 75" in run.text()
    assert events(tmp_path / "run")[-1]["exit_code"] == 75


@pytest.mark.parametrize(
    ("how", "status", "code"), [("thread", "3", 3), pytest.param("pool", "error", 1, marks=pytest.mark.slow)]
)
def test_a_script_has_all_its_time_and_is_ended_after_its_end(
    how: str, status: str, code: int, run_ringtrain: RunRingtrain, tmp_path: Path
) -> None:
    finished = run_ringtrain(
        [how, tmp_path / "run", status], python=["-m", "tests.world.workloads.keeping"], timeout=60
    )
    assert finished.rc == code, finished.stderr
    assert "the script goes on" in finished.stdout
    assert re.search(kept_by(how, code=code), finished.stderr), finished.stderr


@pytest.mark.slow
def test_a_forked_process_that_comes_back_does_not_touch_an_evaluation(
    run_ringtrain: RunRingtrain, tmp_path: Path
) -> None:
    workload = ["--workload", f"{STAYING}:LastingForker"]
    assert run_ringtrain([*workload, "--out", tmp_path / "run", "--epochs", "1"], timeout=60).rc == 0
    evaluation = ["eval", tmp_path / "run", *workload]
    finished = run_ringtrain(evaluation, python=["-m", "launch", "local", "-np", "2", "--"], timeout=60)
    assert finished.rc == 0, finished.stderr
    assert finished.stderr.count("ValueError: of the forked process") == 2
    assert len(re.findall(r"process \d+, .* came back into ringtrain", finished.stderr)) == 2
    assert finished.stdout.count("eval loss") == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [None, "mpirun", "horovodrun --gloo"])
def test_a_forked_process_that_comes_back_does_not_touch_the_run(
    launcher: str | None, run_ringtrain: RunRingtrain, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    arguments = ["--workload", f"{STAYING}:LastingForker", "--out", out, "--epochs", "1"]
    finished = run_ringtrain(arguments, launcher=launcher, timeout=60)
    assert finished.rc == 0, finished.stderr
    num_ranks = 2 if launcher else 1
    assert finished.stderr.count("ValueError: of the forked process") == num_ranks
    assert len(re.findall(r"process \d+, .* came back into ringtrain", finished.stderr)) == num_ranks
    assert finished.stdout.count("323 parameters") == 1
    assert [event["status"] for event in events(out, "end")] == ["completed"]
    assert len(events(out, "start")) == 1
    assert "released" in (next((out / ".lease").iterdir())).read_text()
