"""``python -m launch local``: a run survives what kills its processes, and none of them survives the run."""

import random
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.world.processes import clean_environment, run_command
from tests.world.running import (
    Run,
    assert_history_is_whole,
    digest,
    events,
    final_checkpoint,
    last_step,
    run_to_end,
    running,
)

EPOCHS, STEPS = 20, 160  # 50 samples, 7 in a batch: 8 steps an epoch
LENGTH = ("--epochs", str(EPOCHS), "--eval_every_epochs", "5", "--deterministic", "true")
SLOW = {"RINGTRAIN_TEST_STEP_SECONDS": "0.03", "RINGTRAIN_TEST_SAVE_SECONDS": "0.1"}


def launch_local(*options: str) -> list[str]:
    return [sys.executable, "-m", "launch", "local", "-np", "2", *options, "--"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    run_to_end(out, *LENGTH)
    return out


def kill_rank_0(run: Run) -> None:
    run.signal_rank(0, signal.SIGKILL)


def kill_rank_1(run: Run) -> None:
    run.signal_rank(1, signal.SIGKILL)


def kill_both(run: Run) -> None:
    pids = [run.rank_pid(rank) for rank in (0, 1)]
    run.send(pids, signal.SIGKILL)


def kill_launcher(run: Run) -> None:
    run.send(launchers(run)[:1], signal.SIGKILL)


def end_launcher(run: Run) -> None:
    run.send(launchers(run)[:1], signal.SIGTERM)


def launchers(run: Run) -> list[int]:
    return [*run.pids_of("mpirun"), *run.pids_of("horovodrun")]


INJURIES: tuple[Callable[[Run], None], ...] = (kill_rank_0, kill_rank_1, kill_both, kill_launcher, end_launcher)


@pytest.mark.parametrize(
    ("controller", "injuries"),
    [
        pytest.param("mpi", 6, marks=pytest.mark.slow),
        pytest.param("gloo", 5, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(600)
def test_a_run_ends_bit_equal_whatever_is_killed(
    controller: str, injuries: int, undisturbed: Path, tmp_path: Path
) -> None:
    """At random moments, one of them inside a save."""
    seed = random.SystemRandom().randrange(10**6)
    generator = random.Random(seed)
    shuffled = generator.sample(INJURIES, len(INJURIES))
    chosen = (shuffled * 2)[:injuries]
    in_a_save = generator.randrange(injuries)
    said = []
    with running(
        tmp_path / "run", *LENGTH, start=launch_local("--max_restarts", "20", "--controller", controller), env=SLOW
    ) as run:
        for number, injure in enumerate(chosen):
            run.wait_for_starts(number + 1)
            first = events(run.out, "start")[-1]["first_step"]
            run.wait_for_step(first + 6 + generator.randrange((STEPS - 40) // injuries - 6))
            run.wait_for_checkpoint_after(first)  # else it would not be started again
            if number == in_a_save:
                run.wait_for_save()
            said.append(f"{injure.__name__} at {last_step(run.out)}")
            injure(run)
        code = run.wait(120)
    print(f"seed {seed}: {', '.join(said)}")
    assert code == 0, run.text()
    assert run.text().count(" of 20, from the checkpoint of step ") == injuries
    assert digest(final_checkpoint(run.out, STEPS)) == digest(final_checkpoint(undisturbed, STEPS)), f"seed {seed}"
    assert_history_is_whole(run.out, epochs=EPOCHS, steps=STEPS)


@pytest.mark.slow
def test_ctrl_c_saves(tmp_path: Path) -> None:
    """It goes to the ranks, not to mpirun, which would leave them a second."""
    out = tmp_path / "run"
    slow_save = SLOW | {"RINGTRAIN_TEST_SAVE_SECONDS": "4"}
    with running(out, *LENGTH, "--checkpoint_every", "1000", start=launch_local(), env=slow_save) as run:
        run.wait_for_step(4)
        run.signal_launcher(signal.SIGINT)
        assert run.wait() == 75, run.text()
    assert "launch: SIGINT: the ranks save and leave; Ctrl-C again ends them at once" in run.text()
    assert run.text().count("SIGINT: ") == 1, "it is acknowledged once"
    assert run.text().splitlines()[-1].startswith("launch: stopped by SIGINT at rank 0 on ")
    assert [event["exit_code"] for event in events(out, "end")] == [75]


@pytest.mark.slow
def test_a_terminal_has_the_progress_bar_of_rank_0(tmp_path: Path) -> None:
    command = [*launch_local(), "--workload", "digits", "--epochs", "2", "--out", str(tmp_path / "run")]
    shown = run_command(command, env=clean_environment(), timeout=120, terminal=True).stdout
    assert re.search(r"100%\s+ETA", shown), shown
    assert re.search(r"loss [\d.]+  [\d,]+ examples/s", shown), shown
    assert "[0] step" not in shown


@pytest.mark.slow
@pytest.mark.cold  # launch names the process that it started
def test_the_first_rank_to_fail_is_named_last(tmp_path: Path) -> None:
    with running(tmp_path / "run", *LENGTH, start=launch_local(), env=SLOW) as run:
        run.wait_for_step(2)
        pid = run.rank_pid(1)
        run.signal_rank(1, signal.SIGKILL)
        assert run.wait() == 1, run.text()
    assert re.search(rf"rank 1 .*\(pid {pid}\) .*SIGKILL", run.text().splitlines()[-1]), run.text()


def test_wrong_input_is_reported_once_and_last_with_its_code(tmp_path: Path) -> None:
    with running(tmp_path / "run", "--epochs", "0", start=launch_local("--max_restarts", "3")) as run:
        assert run.wait() == 2
    said = run.text().splitlines()
    assert said[-1] == "launch:   [0] ringtrain: error: epochs is 0; it must be at least 1."
    assert "restart" not in run.text()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["guard", "worker"])
def test_no_process_outlives_a_launch_that_is_killed(which: str, tmp_path: Path) -> None:
    with running(tmp_path / "run", *LENGTH, start=launch_local("--max_restarts", "3"), env=SLOW) as run:
        run.wait_for_step(2)
        both = [pid for pid in run.pids_of("launch") if pid not in (run.rank_pid(0), run.rank_pid(1))]
        guard = run.launcher_pid
        assert len(both) == 2
        run.send([guard] if which == "guard" else [pid for pid in both if pid != guard], signal.SIGKILL)
        assert run.wait(10) in (1, -signal.SIGKILL), run.text()
