"""Processes of a contender: bounded, and none outlives its run."""

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.children import ChildFailedError, run_together
from benchmarks.contenders import Command, Comparison, Contender, Experiment, Finished, Outcome
from benchmarks.rounds import Runner, find_faults, measure

ORPHAN = """
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
"""


def python(code: str, *arguments: str) -> Command:
    return Command(argv=(sys.executable, "-c", code, *arguments))


def run(*commands: Command, directory: Path, timeout: float = 30) -> Finished:
    return run_together(commands, directory, env=dict(os.environ), cwd=directory, timeout=timeout)


def test_a_failed_process_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError, match=r"ended with 3; its last lines:\n    the reason"):
        run(python("print('the reason', flush=True); raise SystemExit(3)"), directory=tmp_path)


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ChildFailedError, match="was not done after 1 s"):
        run(python("import time; time.sleep(600)"), directory=tmp_path, timeout=1)
    assert time.monotonic() - start < 20


def test_processes_that_a_child_leaves_behind_are_ended(tmp_path: Path) -> None:
    run(python(ORPHAN, str(tmp_path / "pid")), directory=tmp_path)
    stat = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"  # which nobody has reaped yet


def test_the_first_line_of_a_step_is_timed(tmp_path: Path) -> None:
    finished = run(python("print('[1,0]<stdout>:step 1, loss = 2.3 (0.1 sec/batch)')"), directory=tmp_path)
    assert finished.sec_until_first_step is not None
    assert run(python("print('done')"), directory=tmp_path).sec_until_first_step is None


def test_a_failed_contender_does_not_stop_the_others(tmp_path: Path) -> None:
    def contender(name: str, code: str) -> Contender:
        read = lambda finished: Outcome(figures={"step": 1.0}, checked=f"{name} was")  # noqa: E731
        return Contender(name=name, description="", commands=(python(code),), read=read)

    good, bad = contender("good", "pass"), contender("bad", "raise SystemExit('broken')")
    experiment = Experiment(
        name="E", unit="a step", contenders=(good, bad), comparisons=(Comparison(name="good", other="bad"),)
    )
    runner = Runner(tmp_path, env=dict(os.environ), timeout=30)
    measured = measure(experiment, runner, rounds=2, seed=0, note=lambda result: None)
    runs = [each["runs"] for each in measured["rounds"]]
    assert [each["good"]["figures"] for each in runs] == [{"step": 1.0}] * 2
    assert all("broken" in each["bad"]["fault"] for each in runs)
    assert len(find_faults({"experiments": [measured]})) == 2
    assert not list(tmp_path.iterdir())
