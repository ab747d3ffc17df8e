"""Every fault of the table ends as documented: in time, with its rank named, and nothing good lost."""

from __future__ import annotations

import itertools
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringtrain.run.checkpoint import read_checkpoint
from ringtrain.run.store import list_steps, step_name
from tests.faults.table import BY_DEFAULT, NUM_RANKS, WRITTEN, Case, cases
from tests.world.running import Run, assert_history_is_whole, events, running

WORKLOAD = "tests.faults.faulty:Faulty"
EPOCHS, STEPS = 3, 24
FLAGS = ("--epochs", "3", "--eval_every_epochs", "2", "--checkpoint_every", "5", "--check_replicas_every", "6")
HANG_TIMEOUT = 5
WATCH = ("--hang_timeout", str(HANG_TIMEOUT))
LONG_SECONDS = 30  # for what may take long; with three ranks on two cores the start does
STEP_SECONDS = 0.5
REACH_SECONDS = 120  # from the start to the fault
ANSWER_SECONDS = 30  # from the fault to the end
NODE = re.escape(socket.gethostname())
LAUNCH = [sys.executable, "-m", "launch", "local", "-np", str(NUM_RANKS)]
STARTS = {
    "launch": [*LAUNCH, "--"],
    "launch over Gloo": [*LAUNCH, "--controller", "gloo", "--"],
    "mpirun": None,
    "horovodrun": ["horovodrun", "-np", str(NUM_RANKS), sys.executable, "-m", "ringtrain"],
}
# Of a rank that a signal ends these launchers say so themselves.
SIGNALLED = r"rank {rank} .*exited on signal|rank {rank} on {node} is gone"
# Of one that leaves in silence the others do; or mpirun, where it ends them before they come to speak.
LEFT = r"error: .*lost rank {rank} on {node} while this one|due to process rank {rank} .*\n.* exiting improperly"


WAYS = {
    "": (),
    ", updates sharded": ("--shard_optimizer", "true", "--jit_compile", "true"),
    ", many steps in a call": ("--steps_per_call", "3", "--log_every", "100"),
}


def matrix() -> list[Any]:
    """All cases. Those that the way of training could matter to have each way in turn."""
    found = list(cases())
    missing = BY_DEFAULT - {case.name for case in found}
    assert not missing, f"no such cases: {missing}"
    ways, parameters = itertools.cycle(WAYS), []
    for case in found:
        is_slow = case.name not in BY_DEFAULT
        way = next(ways) if is_slow and may_depend_on_way(case) else ""
        marks = [pytest.mark.slow] * is_slow
        parameters.append(pytest.param(case, WAYS[way], id=f"{case.name}{way}", marks=marks))
    return parameters


def may_depend_on_way(case: Case) -> bool:
    """Whether ranks sum, wait or save when the fault comes. Within a step it is Python, which XLA has not."""
    return case.launcher == "launch" and case.moment in ("data", "all-reduce", "evaluation", "save", "end")


@pytest.mark.parametrize(("case", "flags"), matrix())
@pytest.mark.timeout(REACH_SECONDS + LONG_SECONDS + ANSWER_SECONDS + 120)
def test_a_fault_is_answered(
    case: Case, flags: tuple[str, ...], tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    """A run with sharded updates goes on in one process, which has all slots."""
    out, here = tmp_path / "run", tmp_path / "here"
    is_long = case.fault in ("SIGSTOP", "sleep") and case.moment in ("setup", "compile", "evaluation", "end")
    env = {"RINGTRAIN_TEST_FAULT": hook_of(case), "RINGTRAIN_TEST_HERE": str(here)}
    env |= {"RINGTRAIN_TEST_LONG_SECONDS": str(LONG_SECONDS)} if is_long else {}
    # Before the fault each rank is to hear that the last step that might take long is done.
    env |= {"RINGTRAIN_TEST_STEP_SECONDS": str(STEP_SECONDS)} if case.what.exit_code == 6 else {}
    options = {"workload": WORKLOAD, "np": NUM_RANKS, "start": STARTS[case.launcher]}
    with running(out, *FLAGS, *WATCH, *flags, env=env, **options) as run:
        run.wait_for("the fault", lambda: here.exists() or has_left(run), timeout=REACH_SECONDS)
        began = time.monotonic()
        if case.what.signal:
            do_from_outside(case, run, here)
        code = run.wait(ANSWER_SECONDS + (LONG_SECONDS if is_long else 0))
        record_property("answer_seconds", round(time.monotonic() - began, 1))
    assert_answered(case, run, code)
    assert_nothing_is_lost(case, out, tmp_path / "resumed.log", logs_all_steps="--log_every" not in flags)
    assert "--steps_per_call" not in flags or (tmp_path / "here-many").exists()
    record_property("resumed", case.what.resumes)


def hook_of(case: Case) -> str:
    """What the workload does, where: to itself, or a pause in which the fault comes from outside."""
    if case.moment == "all-reduce":  # in which the others wait for one that waits for data
        return f"pause@data:{(case.rank + 1) % NUM_RANKS}"
    return f"{case.what.act}@{case.moment}:{0 if case.moment in WRITTEN else case.rank}"


def has_left(run: Run) -> bool:
    """Whether the run tells of its end; the pause was not reached then."""
    return "ringtrain: error" in run.text()


def do_from_outside(case: Case, run: Run, here: Path) -> None:
    assert case.what.signal
    if case.moment == "all-reduce":
        time.sleep(0.3)  # the others have their data; they get from there to the reduction in milliseconds
    run.signal_rank(case.rank, case.what.signal)
    here.unlink(missing_ok=True)


def assert_answered(case: Case, run: Run, code: int) -> None:
    """The exit code, the message and the last record are as documented."""
    text = run.text()
    is_ours = case.launcher.startswith("launch")
    assert code == case.what.exit_code if is_ours else code != 0, text
    is_signalled = case.what.status is None and case.what.signal is not None
    named = case.what.named
    if not is_ours:
        named = SIGNALLED if is_signalled else LEFT if case.fault == "quit" else named
    assert re.search(named.format(rank=case.rank, node=NODE), text), text
    if case.what.status:
        end = events(run.out, "end")[-1]
        assert (end["status"], end["exit_code"]) == (case.what.status, case.what.exit_code)
        if case.fault == "sleep" and end["status"] == "hang":
            [stacks] = [group["text"] for group in end["stacks"] if group["ranks"] == [case.rank]]
            assert "tests/faults/faulty.py" in stacks
    if case.fault != "raise":
        assert "Traceback" not in text
    assert "Missing ranks" not in text  # Horovod's own word for a stall
    if is_ours and case.what.exit_code != 75:
        last = ([line for line in text.splitlines() if line.startswith("launch: ") and "rank " in line] or [""])[-1]
        assert re.search(f"rank {case.rank} on {NODE}", last), f"what is read last does not name the rank:\n{text}"


def assert_nothing_is_lost(case: Case, out: Path, log: Path, *, logs_all_steps: bool) -> None:
    """What is saved is whole, and the same command resumes to the end."""
    root = out / "checkpoints"
    for step in list_steps(root):
        assert read_checkpoint(root / step_name(step)).step == step
    if not case.what.resumes:
        return
    with running(out, *FLAGS, np=1, workload=WORKLOAD, log=log) as run:
        assert run.wait(90) == 0, run.text()
    if logs_all_steps:
        assert_history_is_whole(out, epochs=EPOCHS, steps=STEPS)
    else:
        assert events(out, "train")[-1]["step"] == STEPS
