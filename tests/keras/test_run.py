"""``callbacks.Run``: a ``fit`` that is killed or told to stop goes on bit for bit, and one that fails says why."""

import random
import re
import signal
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.keras.kept import BATCHES, EPOCHS
from tests.world.processes import REPOSITORY, Finished, clean_environment, run_command
from tests.world.running import Run, events, last_step, read_tensorboard, running

SCRIPT = REPOSITORY / "tests/keras/kept.py"
STEPS = EPOCHS * BATCHES
SLOW_STEP = {"RINGTRAIN_TEST_STEP_SECONDS": "0.05"}
ENV = {"PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "3"}


def command(*arguments: object, np: int = 2) -> list[str]:
    mpirun = ["mpirun", "-np", str(np), "--oversubscribe", "--bind-to", "none"] if np > 1 else []
    return [*mpirun, sys.executable, str(SCRIPT), *map(str, arguments)]


def fit(kind: str, out: Path, np: int = 2, **env: str) -> Finished:
    return run_command(command(kind, out, np=np), env=clean_environment(**ENV, **env), timeout=120)


def said(text: str) -> list[str]:
    """Each rank's last line: digests of what all ranks hold alike, and of what is its own."""
    return sorted(set(re.findall(r"rank \d: \w{16} \w{16} after", text)))


def interrupted(kind: str, out: Path) -> AbstractContextManager[Run]:
    return running(out, start=command(kind, out), env={**ENV, **SLOW_STEP})


KINDS = [
    "dataset",
    *(
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in ("arrays", "finite", "stateful", "pydataset")  # others stop in test_kept.py
    ),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_fit_resumes_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """In the second epoch, after a checkpoint in its middle."""
    reference = fit(kind, tmp_path / "reference")
    assert reference.rc == 0, reference.stdout + reference.stderr
    assert len(said(reference.stdout)) == 2
    out = tmp_path / "run"
    with interrupted(kind, out) as run:
        run.wait_for_checkpoint_after(BATCHES + 2)
        run.kill()
    assert not (out / "report.html").exists()
    finished = fit(kind, out)
    assert finished.rc == 0, finished.stdout + finished.stderr
    step = events(out, "start")[-1]["first_step"]
    assert step > BATCHES + 2
    assert re.search(rf"it resumes from the checkpoint of step {step}, at epoch [23], batch", finished.stdout)
    assert said(finished.stdout) == said(reference.stdout)
    for event in ("train", "eval"):
        names = ("step", "loss", "accuracy")
        found, wanted = ([[e[n] for n in names] for e in events(o, event)] for o in (out, tmp_path / "reference"))
        assert found == wanted
    read_tensorboard(out)
    assert (out / "report.html").is_file()


@pytest.mark.slow
def test_a_fit_killed_at_random_moments_resumes_bit_for_bit(tmp_path: Path) -> None:
    chance = random.Random(seed := random.randrange(10**6))
    reference, out = fit("dataset", tmp_path / "reference"), tmp_path / "run"
    killed_after = []
    for _ in range(3):
        with interrupted("dataset", out) as run:
            run.wait_for_step(last_step(out) + chance.randint(1, 5))
            time.sleep(chance.uniform(0, 0.2))  # anywhere: in a step, a save, the validation
            run.kill()
        killed_after.append(last_step(out))
    finished = fit("dataset", out)
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert said(finished.stdout) == said(reference.stdout), f"seed {seed}, killed after steps {killed_after}"
    steps = [event["step"] for event in events(out, "train")]
    assert steps == [event["step"] for event in events(tmp_path / "reference", "train")]


@pytest.mark.slow
def test_a_fit_saves_on_sigterm_and_reports_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with interrupted("dataset", out) as run:
        run.wait_for_step(4)
        run.signal_rank(1, signal.SIGTERM)
        assert run.wait() == 75, run.text()
    end = events(out)[-1]
    assert (end["event"], end["status"], end["exit_code"]) == ("end", "preempted", 75)
    assert re.search(r"ringtrain: stopped by SIGTERM at rank 1 on \S+: step \d+ is saved in ", run.text())
    assert "Traceback" not in run.text()
    finished = fit("dataset", out)
    assert (finished.rc, events(out)[-1]["status"]) == (0, "completed"), finished.stdout + finished.stderr
    again = fit("dataset", out)
    assert again.rc == 0, again.stderr
    assert f"the run in {out} is complete: {STEPS} steps, whose weights the model has now" in again.stdout
    assert "after 0 epochs" in again.stdout
    assert [line.split()[2] for line in said(again.stdout)] == [line.split()[2] for line in said(finished.stdout)]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    finished = fit("nan", tmp_path / "run")
    assert finished.rc == 4, finished.stdout + finished.stderr
    assert re.search(r"error: .*loss of rank 1 .*step 6\b", finished.stderr)
    assert "Traceback" not in finished.stderr
    assert all(event["step"] < 6 for event in events(tmp_path / "run", "checkpoint"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("twice", 2, "callbacks.Run was given twice"),
        ("apart", 2, "is not distributed"),
        ("unbuilt", 2, "cannot be created from the shapes of a batch"),
        ("epoch", 2, "initial_epoch is 1, but callbacks.Run knows the epoch"),
        ("uneven", 2, "1 of 2 ranks have ended their epoch before batch 10"),
        ("one", 1, "rank 0 at 'a fit with callbacks.Run', rank 1 at 'guard_plan'"),
    ],
)
def test_misuse_is_reported(tmp_path: Path, kind: str, code: int, message: str) -> None:
    finished = fit(kind, tmp_path / "run")
    assert finished.rc == code, finished.stderr
    assert message in finished.stderr
    assert not finished.left_behind


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "pattern"),
    [
        (
            "hangs",
            6,
            r"rank 1 on \S+ runs the callbacks after step 6 \(\d+ s\), in .*kept\.py:\d+ \(on_train_batch_end\); ",
        ),
        ("fails", 1, r"rank 1 on \S+ failed: ValueError: this rank alone"),
    ],
)
def test_a_rank_that_hangs_or_fails_alone_ends_all_with_its_name(
    tmp_path: Path, kind: str, code: int, pattern: str
) -> None:
    finished = fit(kind, tmp_path / "run")
    assert finished.rc == code, finished.stderr
    assert re.search(pattern, finished.stderr), finished.stderr
    assert not finished.left_behind
    assert events(tmp_path / "run")[-1]["exit_code"] == code


@pytest.mark.slow
def test_a_resumed_eager_epoch_without_batches_exits(tmp_path: Path) -> None:
    """Such a rank does not know what the others sum. Nothing is compiled: the first step has no time for that.

    The watchdog names rank 1, or rank 0 has counted the ranks before.
    """
    out = tmp_path / "run"
    with interrupted("eager", out) as run:
        run.wait_for_checkpoint_after(4)
        run.kill()
    step = max(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))
    assert step < BATCHES
    finished = fit("eager", out, RINGTRAIN_TEST_BATCHES=str(step))
    assert finished.rc in (2, 6), finished.stdout + finished.stderr
    answers = {6: r"rank 1 on \S+ waits for the other ranks \(\d+ s\)", 2: "1 of 2 ranks have ended their epoch before"}
    assert re.search(answers[finished.rc], finished.stderr), finished.stderr
    assert events(out)[-1]["exit_code"] == finished.rc


@pytest.mark.slow
def test_ctrl_c_of_launch_local_is_acknowledged_once(tmp_path: Path) -> None:
    out, launch = tmp_path / "run", [sys.executable, "-m", "launch", "local", "-np", "2", "--"]
    start = [*launch, str(SCRIPT), "dataset", str(out)]
    with running(out, start=start, env={**ENV, **SLOW_STEP}) as run:
        run.wait_for_step(4)
        run.signal_launcher(signal.SIGINT)
        assert run.wait() == 75, run.text()
    assert "launch: SIGINT: " in run.text()
    assert run.text().count("SIGINT: ") == 1


@pytest.mark.slow
def test_other_settings_and_other_numbers_of_ranks(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with interrupted("dataset", out) as run:
        run.wait_for_checkpoint_after(BATCHES + 2)
        run.kill()
    finished = fit("dataset", out, RINGTRAIN_TEST_RATE="0.02")
    assert finished.rc == 2
    assert "options.learning_rate 0.05" in finished.stderr
    finished = fit("dataset", out, np=3)
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert "was written by 2 ranks, and now there are 3: epoch 2 starts again with its weights" in finished.stdout
