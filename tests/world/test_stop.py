"""Requests to stop, of every kind and at every moment: all is saved at one step, and the same command resumes."""

import contextlib
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.world.running import Run, assert_history_is_whole, digest, events, final_checkpoint, run_to_end, running

EPOCHS, STEPS = 6, 48
SLOW_STEP = {"RINGTRAIN_TEST_STEP_SECONDS": "0.05"}


def end_of(out: Path) -> tuple[str, int]:
    end = events(out)[-1]
    assert end["event"] == "end"
    return end["status"], end["exit_code"]


def assert_went_on(out: Path, undisturbed: Path) -> None:
    """The same command, once more, ends as the undisturbed run did."""
    run_to_end(out, "--deterministic", "true")
    assert_history_is_whole(out, epochs=EPOCHS, steps=STEPS)
    assert digest(final_checkpoint(out, STEPS)) == digest(final_checkpoint(undisturbed, STEPS))
    assert [e["step"] for e in events(out, "eval")] == [e["step"] for e in events(undisturbed, "eval")]


def message_of(run: Run) -> str:
    [message] = [line for line in run.text().splitlines() if line.startswith("ringtrain: ")]
    return message


def test_a_signal_to_one_rank_stops_all_at_one_step(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(out, "--deterministic", "true", env=SLOW_STEP) as run:
        run.wait_for_step(7)
        run.signal_rank(1, signal.SIGUSR1)
        assert run.wait() == 75, run.text()
    assert end_of(out) == ("preempted", 75)
    step = events(out, "train")[-1]["step"]
    assert "SIGUSR1 at rank 1 on" in message_of(run)
    assert f"step {step} of {STEPS} is saved" in message_of(run)
    assert_went_on(out, undisturbed)


@pytest.mark.slow
def test_a_stop_file_stops_the_run_once(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(out, "--deterministic", "true", env=SLOW_STEP) as run:
        run.wait_for_step(3)
        (out / "stop").touch()
        assert run.wait() == 75, run.text()
    assert end_of(out) == ("preempted", 75)
    assert f"stopped by the file {out / 'stop'}" in message_of(run)
    assert not (out / "stop").exists()
    assert "preempted, exit code 75" in (out / "report.html").read_text()
    assert_went_on(out, undisturbed)
    assert f"started again on 2 ranks from step {events(out, 'start')[1]['first_step']}" in (
        (out / "report.html").read_text()
    )


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_within_its_grace_period(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(out, "--deterministic", "true", env=SLOW_STEP) as run:
        run.wait_for_step(12)
        run.signal_launcher(signal.SIGTERM)
        print("mpirun returned", run.wait())
    assert "SIGTERM: saving after this step" in run.text()
    assert end_of(out) == ("preempted", 75)
    assert_went_on(out, undisturbed)


@pytest.mark.slow
def test_sigterm_during_a_slow_save_loses_no_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    slow = SLOW_STEP | {"RINGTRAIN_TEST_SAVE_SECONDS": "3"}
    with running(out, "--deterministic", "true", env=slow) as run:
        run.wait_for_save()
        run.signal_launcher(signal.SIGTERM)
        run.wait()
    assert "ends the ranks before that, nothing is saved" in run.text()
    assert_went_on(out, undisturbed)


@pytest.mark.slow
def test_a_signal_during_a_save_waits_for_it(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(out, "--deterministic", "true", env=SLOW_STEP | {"RINGTRAIN_TEST_SAVE_SECONDS": "0.5"}) as run:
        run.wait_for_save()
        run.signal_rank(0, signal.SIGUSR1)
        assert run.wait() == 75, run.text()
    assert end_of(out) == ("preempted", 75)
    saved = [event["step"] for event in events(out, "checkpoint")]
    assert saved[0] == 5
    assert saved[-1] == events(out, "train")[-1]["step"]
    assert_went_on(out, undisturbed)


@pytest.mark.slow
def test_an_evaluation_stopped_by_a_signal_is_done_on_restart(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    env = SLOW_STEP | {"RINGTRAIN_TEST_STOP_IN_EVALUATION": "1"}
    with running(out, "--deterministic", "true", env=env) as run:
        assert run.wait() == 75, run.text()
    assert end_of(out) == ("preempted", 75)
    assert not events(out, "eval")
    assert events(out, "train")[-1]["step"] == 16
    assert_went_on(out, undisturbed)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGUSR1, signal.SIGINT))]
)
def test_a_signal_before_the_first_step_exits_without_saving(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "run"
    started = tmp_path / "started"
    env = {"RINGTRAIN_TEST_START_SECONDS": "3", "RINGTRAIN_TEST_STARTED": str(started)}
    with running(out, env=env) as run:
        run.wait_for("the start", started.exists)
        run.signal_rank(0, number)
        assert run.wait() == 75, run.text()
    assert end_of(out) == ("preempted", 75)
    assert "before the first step" in message_of(run)
    assert not list((out / "checkpoints").glob("*"))


def test_ctrl_c_without_a_launcher_saves_and_shows_how_to_resume(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(out, np=1, env=SLOW_STEP) as run:
        run.wait_for_step(2)
        run.signal_launcher(signal.SIGINT)
        assert run.wait() == 75, run.text()
    assert "The same command resumes from there." in message_of(run)
    assert "Traceback" not in run.text()
    assert events(out, "checkpoint")


# --- Terminals and launchers that go ---

HOROVODRUN = ["horovodrun", "-np", "2", sys.executable, "-m", "ringtrain"]
HOROVODRUN_GLOO = ["horovodrun", "--gloo", "-np", "2", sys.executable, "-m", "ringtrain"]


def assert_last_step_is_saved(out: Path) -> None:
    assert end_of(out) == ("preempted", 75)
    assert final_checkpoint(out, events(out, "train")[-1]["step"]).is_dir()


def test_a_terminal_that_is_closed_saves_like_sigterm(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(out, np=1, env=SLOW_STEP) as run:
        run.wait_for_step(2)
        run.signal_launcher(signal.SIGHUP)
        assert run.wait() == 75, run.text()
    assert "stopped by SIGHUP at rank 0" in message_of(run)
    assert_last_step_is_saved(out)


@pytest.mark.slow
def test_a_run_under_nohup_survives_its_terminal_and_shell(tmp_path: Path) -> None:
    out = tmp_path / "run"
    start = ["nohup", "bash", "-c", '"$@" & sleep 20', "bash", sys.executable, "-m", "ringtrain"]
    with running(out, np=1, start=start, env=SLOW_STEP) as run:
        run.wait_for_step(2)
        [rank] = [pid for pid in run.pids_of("ringtrain") if pid != run.launcher_pid]
        run.signal_launcher(signal.SIGKILL)
        run.send([rank], signal.SIGHUP)
        run.wait_until_gone()
    assert end_of(out) == ("completed", 0)


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(None, id="mpirun", marks=pytest.mark.slow),
        pytest.param(HOROVODRUN, id="horovodrun", marks=pytest.mark.slow),
        pytest.param(HOROVODRUN_GLOO, id="horovodrun over Gloo", marks=pytest.mark.slow),
    ],
)
def test_ranks_of_a_killed_launcher_save_and_exit(start: list[str] | None, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(out, "--deterministic", "true", start=start, env=SLOW_STEP) as run:
        run.wait_for_step(7)
        run.signal_launcher(signal.SIGKILL)
        run.wait_until_gone()
    assert_last_step_is_saved(out)
    # What horovodrun over Gloo leaves of itself may be the first to tell them.
    causes = ("stopped by the end of its launcher (pid ", *(["stopped by SIGTERM"] if start is HOROVODRUN_GLOO else []))
    assert events(out)[-1]["message"].startswith(causes)
    assert_went_on(out, undisturbed)


@pytest.mark.parametrize(
    "start", [pytest.param(None, id="mpirun"), pytest.param(HOROVODRUN, id="horovodrun", marks=pytest.mark.slow)]
)
def test_ranks_of_a_launcher_killed_before_they_joined_exit(start: list[str] | None, tmp_path: Path) -> None:
    with running(tmp_path / "run", "--epochs", "2000", start=start, env=SLOW_STEP) as run:
        run.wait_for("ranks that listen to signals", lambda: len(list(filter(blocks_sigterm, ranks_of(run)))) == 2)
        run.signal_launcher(signal.SIGKILL)
        run.wait_until_gone()
    assert not events(tmp_path / "run", "end") or events(tmp_path / "run", "end")[-1]["exit_code"] == 75


def ranks_of(run: Run) -> set[int]:
    return set(run.pids_of("ringtrain")).difference(*map(run.pids_of, ("horovodrun", "mpirun", "sh")))


def blocks_sigterm(pid: int) -> bool:
    with contextlib.suppress(OSError):
        blocked = re.search(r"^SigBlk:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return blocked is not None and bool(int(blocked[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


@pytest.mark.slow
def test_ranks_that_are_detached_train_on_without_their_launcher(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(out, "--detached", "true", start=HOROVODRUN, env=SLOW_STEP) as run:
        run.wait_for_step(3)
        run.signal_launcher(signal.SIGKILL)
        run.wait_until_gone()
    assert end_of(out) == ("completed", 0)


@pytest.mark.slow
def test_max_hours_saves_in_time(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    hours = 8 / 3600  # from the opening of the run directory on; TensorFlow takes three seconds to trace the step
    very_slow = {"RINGTRAIN_TEST_STEP_SECONDS": "0.3"}
    with running(out, "--deterministic", "true", "--max_hours", str(hours), env=very_slow) as run:
        assert run.wait() == 75, run.text()
    assert events(out)[-1]["stopped_by"] == "time"
    assert "stopped by --max_hours 0.00222" in message_of(run)
    assert_went_on(out, undisturbed)
