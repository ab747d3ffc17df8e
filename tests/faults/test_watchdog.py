"""What the watchdog takes for a hang and what it does not, besides the faults of ``test_matrix``."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.world.running import events, last_step, running

TIMEOUT = 4
WATCHED = ("--hang_timeout", str(TIMEOUT), "--epochs", "1000", "--checkpoint_every", "20", "--eval_every_epochs", "0")
# Past the first step, whose longer limit all ranks have forgotten by then, and no step of a save, which may take long.
MOVING = 23
SLOW_STEP = {"RINGTRAIN_TEST_STEP_SECONDS": "0.05"}
# From the last movement to the end: the watchdog's own ticks, last words, and the launcher that ends the others.
ANSWER_SECONDS = TIMEOUT + 15
NODE = socket.gethostname()


@pytest.mark.slow
def test_ranks_that_are_all_suspended_for_a_while_continue(tmp_path: Path) -> None:
    with running(tmp_path / "run", *WATCHED, np=2, env=SLOW_STEP) as run:
        run.wait_for_step(MOVING)
        pids = [run.rank_pid(rank) for rank in range(2)]
        run.send(pids, signal.SIGSTOP)
        time.sleep(2 * TIMEOUT)
        run.send(pids, signal.SIGCONT)
        run.wait_for_step(last_step(run.out) + 60)
        run.signal_rank(1, signal.SIGUSR1)
        assert run.wait() == 75, run.text()
    assert "hang" not in run.text()
    assert "has moved" not in run.text()


@pytest.mark.slow
def test_a_long_start_and_long_saves_are_no_hang(tmp_path: Path) -> None:
    env = {
        "RINGTRAIN_TEST_START_SECONDS": str(2 * TIMEOUT),
        "RINGTRAIN_TEST_STARTED": str(tmp_path / "started"),
        "RINGTRAIN_TEST_SAVE_SECONDS": str(TIMEOUT),  # of each file, and a checkpoint has two
    }
    flags = ("--hang_timeout", str(TIMEOUT), "--epochs", "1", "--checkpoint_every", "0")
    with running(tmp_path / "run", *flags, np=2, env=env) as run:
        assert run.wait(120) == 0, run.text()
    assert "nothing has moved" not in run.text()
    assert "no progress for 4 s: ranks 0, 1" in run.text()
    assert [event["exit_code"] for event in events(run.out, "end")] == [0]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_woken_after_the_others_exited_writes_nothing(rank: int, tmp_path: Path) -> None:
    """Its launcher is stopped, so that nobody else ends it."""
    with running(tmp_path / "run", *WATCHED, np=2, env=SLOW_STEP) as run:
        run.wait_for_step(MOVING)
        pid, other = run.rank_pid(rank), run.rank_pid(1 - rank)
        run.send([pid], signal.SIGSTOP)
        run.send(run.pids_of("mpirun"), signal.SIGSTOP)
        end = time.monotonic() + ANSWER_SECONDS
        while is_running(other):
            assert time.monotonic() < end, run.text()
            time.sleep(0.05)
        before = files_below(run.out)
        run.send([pid], signal.SIGCONT)
        end = time.monotonic() + 10
        while is_running(pid):
            assert time.monotonic() < end, run.text()
            time.sleep(0.05)
        assert files_below(run.out) == before
        run.send(run.pids_of("mpirun"), signal.SIGCONT)
        run.wait()
    assert [end["exit_code"] for end in events(run.out, "end")] == [6]
    json.loads((run.out / "metrics.jsonl").read_text().splitlines()[-1])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def files_below(directory: Path) -> dict[str, int]:
    """Each file's size, but for the lease's signs of life and for TensorBoard's events, which were written before."""
    return {
        str(path): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not {".lease", "tensorboard"} & set(path.parts)
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["busy", "idle"])
def test_a_slow_rank_is_named_and_the_run_continues(how: str, tmp_path: Path) -> None:
    env = {"RINGTRAIN_TEST_HANG": how, "RINGTRAIN_TEST_HANG_RANK": "1"}
    with running(tmp_path / "run", *WATCHED, np=2, env=env) as run:
        run.wait_for("a warning", lambda: bool(events(run.out, "warning")), timeout=200)
        run.wait_for_step(last_step(run.out) + 10)
        run.signal_rank(0, signal.SIGUSR1)
        assert run.wait() == 75, run.text()
    [warning] = events(run.out, "warning")
    assert warning["message"].startswith(f"rank 1 on {NODE} is slow, and the others wait for it")
    assert f"warning: {warning['message']}" in run.text()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_exit_without_a_launcher_after_a_rank_died(rank: int, tmp_path: Path) -> None:
    with running(tmp_path / "run", *WATCHED, np=2, env=SLOW_STEP) as run:
        run.wait_for_step(MOVING)
        other = run.rank_pid(1 - rank)
        run.send(run.pids_of("mpirun"), signal.SIGSTOP)
        run.signal_rank(rank, signal.SIGKILL)
        end = time.monotonic() + ANSWER_SECONDS
        while is_running(other):
            assert time.monotonic() < end, run.text()
            time.sleep(0.05)
        run.send(run.pids_of("mpirun"), signal.SIGCONT)
        run.wait()
    [last] = events(run.out, "end")
    # Who sees it first: the watchdog, or the sum that waits for it.
    assert re.search(rf"rank {rank} on {NODE} (has been gone for|while this one)", last["message"]), last
