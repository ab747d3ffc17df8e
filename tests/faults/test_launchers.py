"""What ends the launcher, or the kernel a rank: nothing of the run is left, and the same command resumes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringtrain.runtime.machine import MEMORY_FILES, cgroup_directories
from tests.world.running import Run, assert_history_is_whole, events, run_to_end, running

EPOCHS, STEPS = 6, 48
SLOW_STEP = {"RINGTRAIN_TEST_STEP_SECONDS": "0.05"}
ANSWER_SECONDS = 30
NODE = re.escape(socket.gethostname())
LAUNCH = [sys.executable, "-m", "launch", "local", "-np", "2", "--"]
LAUNCH_GLOO = [sys.executable, "-m", "launch", "local", "-np", "2", "--controller", "gloo", "--"]
HOROVODRUN = ["horovodrun", "-np", "2", sys.executable, "-m", "ringtrain"]
HOROVODRUN_GLOO = ["horovodrun", "--gloo", "-np", "2", sys.executable, "-m", "ringtrain"]
Record = Callable[[str, Any], None]


def to_the_command(number: signal.Signals) -> Callable[[Run], None]:
    return lambda run: run.signal_launcher(number)


def to_mpirun(number: signal.Signals) -> Callable[[Run], None]:
    return lambda run: run.send(run.pids_of("mpirun")[:1], number)


def interrupt_twice(run: Run) -> None:
    run.signal_launcher(signal.SIGINT)
    time.sleep(0.2)
    run.signal_launcher(signal.SIGINT)


def kill_worker(run: Run) -> None:
    """The process of launch that watches the ranks."""
    run.send([pid for pid in run.pids_of("local") if pid != run.launcher_pid], signal.SIGKILL)


# What is done to whom, and the exit codes that may follow; None: any but 0, as the launcher's own.
CASES: dict[str, tuple[list[str] | None, Callable[[Run], None], tuple[int, ...] | None]] = {
    "launch killed": (LAUNCH, to_the_command(signal.SIGKILL), None),
    "launch over Gloo killed": (LAUNCH_GLOO, to_the_command(signal.SIGKILL), None),
    "launch's worker killed": (LAUNCH, kill_worker, (1,)),
    "launch told to end": (LAUNCH, to_the_command(signal.SIGTERM), (75,)),
    "launch's terminal closed": (LAUNCH, to_the_command(signal.SIGHUP), (75,)),
    "launch interrupted": (LAUNCH, to_the_command(signal.SIGINT), (75,)),
    "launch interrupted twice": (LAUNCH, interrupt_twice, (1, 75)),
    "mpirun killed under launch": (LAUNCH, to_mpirun(signal.SIGKILL), (1,)),
    "mpirun killed": (None, to_the_command(signal.SIGKILL), None),
    "mpirun told to end": (None, to_the_command(signal.SIGTERM), None),
    "horovodrun told to end": (HOROVODRUN, to_the_command(signal.SIGTERM), None),
    "horovodrun over Gloo told to end": (HOROVODRUN_GLOO, to_the_command(signal.SIGTERM), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ranks_exit_with_their_launcher_and_the_run_resumes(case: str, tmp_path: Path, record_property: Record) -> None:
    start, act, codes = CASES[case]
    out = tmp_path / "run"
    with running(out, start=start, env=SLOW_STEP) as run:
        run.wait_for_checkpoint_after(4)
        run.wait_for_step(8)
        began = time.monotonic()
        act(run)
        code = run.wait(ANSWER_SECONDS)
        record_property("answer_seconds", round(time.monotonic() - began, 1))
    assert code in codes if codes else code != 0, run.text()
    assert "Traceback" not in run.text() or case.startswith("horovodrun"), run.text()  # which shows its own
    run_to_end(out, log=tmp_path / "resumed.log")
    assert_history_is_whole(out, epochs=EPOCHS, steps=STEPS)
    starts = events(out, "start")
    assert len(starts) == 1 or starts[-1]["first_step"] >= 5, "the checkpoint is lost"
    record_property("resumed", True)


# --- The kernel ends a rank for want of memory ---

LIMIT_BYTES = 5 * 2**29  # two ranks need about half of it
IN_CGROUP = "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write('0'); os.execvp(sys.argv[2], sys.argv[2:])"


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A group of processes with a limit to its memory; to make one needs a writable hierarchy, as root has it."""
    for controller, limit, _ in MEMORY_FILES:
        for parent in reversed(cgroup_directories(Path("/"), controller)):  # from the root down
            path = parent / f"ringtrain-test-{os.getpid()}"
            with contextlib.suppress(OSError):
                path.mkdir()
                try:
                    os.truncate(path / limit, 0)  # the kernel made it; OSError elsewhere
                    (path / limit).write_text(str(LIMIT_BYTES))
                    yield path
                    return
                finally:
                    path.rmdir()
    pytest.fail("no cgroup with a limit to its memory can be made here")


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(2))
def test_an_out_of_memory_kill_names_the_rank_and_the_limit(
    rank: int, cgroup: Path, tmp_path: Path, record_property: Record
) -> None:
    out, here = tmp_path / "run", tmp_path / "here"
    env = {"RINGTRAIN_TEST_FAULT": f"grow@data:{rank}", "RINGTRAIN_TEST_HERE": str(here)}
    start = [sys.executable, "-c", IN_CGROUP, str(cgroup), *LAUNCH]
    with running(out, start=start, env=env, workload="tests.faults.faulty:Faulty") as run:
        run.wait_for("the fault", here.exists)
        began = time.monotonic()
        code = run.wait(ANSWER_SECONDS + 30)
        record_property("answer_seconds", round(time.monotonic() - began, 1))
    assert code == 1, run.text()
    killed = rf"launch: rank {rank} on {NODE} \(pid \d+\) was killed by SIGKILL, the first to end\n"
    why = (
        r"launch: the kernel killed a process there for want of memory \(the limit of 2\.5 GiB of its cgroup\)\. What "
    )
    assert re.search(killed + why, run.text()), run.text()
    run_to_end(out, workload="tests.faults.faulty:Faulty", log=tmp_path / "resumed.log")
    assert_history_is_whole(out, epochs=EPOCHS, steps=STEPS)
    record_property("resumed", True)
