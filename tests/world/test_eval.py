"""Evaluations: on demand, until nothing gets better, and with a full disk."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.world.conftest import RunRingtrain
from tests.world.processes import REPOSITORY, Finished, MarkedProcess, clean_environment
from tests.world.running import WORKLOAD, events, running

LASTING = ["--workload", f"{WORKLOAD}:Lasting"]
WAITS = """
import os
import time
from tests.world.workloads.small import Small


class Waits(Small):
    def create_model(self):
        if "RINGTRAIN_TEST_WAITS" in os.environ:
            print("waits", flush=True)
            time.sleep(60)
        return super().create_model()
"""


def test_ctrl_c_ends_an_evaluation_without_a_traceback(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WAITS)
    workload = ["--workload", f"{tmp_path / 'mine.py'}:Waits"]
    env = {"PYTHONPATH": str(REPOSITORY)}
    assert run_ringtrain([*workload, "--steps", "1", "--out", tmp_path / "run"], env=env).rc == 0
    command = [sys.executable, "-m", "ringtrain", "eval", str(tmp_path / "run"), *workload]
    env_of_eval = clean_environment(**env, RINGTRAIN_TEST_WAITS="1")
    process = MarkedProcess(command, env_of_eval, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.popen.stdout is not None
        assert b"waits\n" in iter(process.popen.stdout.readline, b"")
        process.popen.send_signal(signal.SIGINT)
        _, stderr = process.popen.communicate(timeout=30)
    finally:
        process.end()
    assert process.popen.returncode == 128 + signal.SIGINT
    assert stderr.decode() == "ringtrain: interrupted (SIGINT).\n"


@pytest.mark.slow
def test_eval_reproduces_the_evaluations_of_training(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run_ringtrain([*LASTING, "--out", out, "--eval_every_epochs", "3"], launcher="mpirun").rc == 0
    seen = {event["step"]: event for event in events(out, "eval")}
    before = (out / "metrics.jsonl").read_bytes()
    best = max(seen.values(), key=lambda event: event["accuracy"])["step"]
    for which, step, launcher in (("best", best, None), ("newest", 48, "mpirun")):
        finished = run_ringtrain(["eval", out, "--checkpoint", which, *LASTING], launcher=launcher)
        assert shown(finished) == (step, round(seen[step]["accuracy"], 4), 13), finished.stdout + finished.stderr
    assert (out / "metrics.jsonl").read_bytes() == before
    finished = run_ringtrain(["eval", out, "--checkpoint", "step-7", *LASTING])
    assert finished.rc == 3
    assert "holds no checkpoint 'step-7'; it holds: step-" in finished.stderr


def shown(finished: Finished) -> tuple[int, float, int]:
    """Step, accuracy and samples of the line that ``eval`` prints."""
    found = re.search(
        r"step (\d+) \(\w+\): eval loss = [\d.]+, accuracy = ([\d.]+), .*\((\d+) samples\)", finished.stdout
    )
    assert found, finished.stdout + finished.stderr
    return int(found[1]), float(found[2]), int(found[3])


@pytest.mark.slow
def test_training_stops_once_evaluations_get_no_better(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = [*LASTING, "--out", out, "--eval_every", "2", "--stop_after", "3"]
    # With such a learning rate every step is worse than the one before.
    arguments += ["--best_metric", "loss", "--best_direction", "min", "--optimizer.lr", "100"]
    finished = run_ringtrain(arguments, launcher="mpirun")
    assert finished.rc == 0
    assert "done (stopped early" in finished.stdout
    losses = [event["loss"] for event in events(out, "eval")]
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + 3 < 24
    assert [path.name for path in (out / "checkpoints").glob("best-*")] == [f"best-step-{2 * (best + 1):09d}"]
    again = run_ringtrain(arguments)
    assert "is complete" in again.stdout


@pytest.mark.slow
def test_a_failed_save_does_not_end_the_run(tmp_path: Path) -> None:
    """A file stands where the checkpoints' directory should be; root is refused by nothing else than this."""
    out = tmp_path / "run"
    with running(out, np=1, env={"RINGTRAIN_TEST_STEP_SECONDS": "0.05"}) as run:
        run.wait_for_step(1)
        assert not (out / "checkpoints").exists()
        (out / "checkpoints").touch()
        run.wait_for("a failed save", lambda: bool(events(out, "warning")))
        (out / "checkpoints").unlink()
        assert run.wait() == 0, run.text()
    [first, *_] = events(out, "warning")
    assert "the checkpoint of step 5 cannot be written below" in first["message"]
    assert f"warning: {first['message']}" in run.text()
    assert events(out, "checkpoint")[-1]["step"] == 48
