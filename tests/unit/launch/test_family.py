"""No process outlives the one that it came of, whichever is killed and wherever it moved to."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.family import find_descendants
from tests.world.processes import REPOSITORY, MarkedProcess, clean_environment

# A worker, its child in a session of its own, and an orphan whose parent has ended.
SCRIPT = """
import os, subprocess, sys, time
from launch.family import run_guarded

def work():
    subprocess.Popen(["setsid", "sleep", "600"])
    subprocess.run(["sh", "-c", "setsid sleep 601 &"])
    print("ready", os.getpid(), flush=True)
    {work}
    return 7

sys.exit(run_guarded(work))
"""


@contextlib.contextmanager
def guarded(work: str) -> Iterator[tuple[MarkedProcess, int]]:
    """A process with its guard, and the worker's number."""
    command = [sys.executable, "-c", SCRIPT.format(work=work)]
    process = MarkedProcess(command, clean_environment(), stdout=subprocess.PIPE)
    try:
        assert process.popen.stdout is not None
        word, pid = process.popen.stdout.readline().split()
        assert word == b"ready"
        yield process, int(pid)
    finally:
        process.end()
        assert process.popen.stdout is not None
        process.popen.stdout.close()


def wait_for_sleepers(process: MarkedProcess, count: int) -> None:
    end = time.monotonic() + 10
    while sum(Path(f"/proc/{pid}/comm").read_text() == "sleep\n" for pid in process.pids()) < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_work_that_returns_leaves_no_process_and_its_exit_code() -> None:
    with guarded("pass") as (process, _):
        assert process.popen.wait(10) == 7
        assert process.pids() == []


@pytest.mark.parametrize("who", ["guard", "worker"])
def test_a_kill_of_either_process_ends_all(who: str, capfd: pytest.CaptureFixture[str]) -> None:
    with guarded("time.sleep(600)") as (process, worker):
        wait_for_sleepers(process, 2)
        os.kill(worker if who == "worker" else process.popen.pid, signal.SIGKILL)
        assert process.popen.wait(10) == (1 if who == "worker" else -signal.SIGKILL)
        said = f"launch: launch itself (pid {worker}, which watched the ranks) was killed by SIGKILL; the ranks"
        assert capfd.readouterr().err.startswith(said) == (who == "worker")
        assert process.wait_until_gone(10)


def test_work_that_raises_leaves_no_process() -> None:
    with guarded("raise KeyError") as (process, _):
        assert process.popen.wait(10) == 1
        assert process.pids() == []


def test_nohup_is_heeded() -> None:
    script = """
import os, signal, sys
from launch.family import run_guarded
from launch.group import Requests

def work():
    requests = Requests()
    os.kill(os.getppid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGHUP)
    return len(requests.signals)

sys.exit(run_guarded(work))
"""
    command = ["nohup", sys.executable, "-c", script]
    finished = subprocess.run(command, env=clean_environment(), cwd=REPOSITORY, capture_output=True, timeout=20)
    assert finished.returncode == 0, finished.stderr
    finished = subprocess.run(command[1:], env=clean_environment(), cwd=REPOSITORY, capture_output=True, timeout=20)
    assert finished.returncode >= 1


def test_descendants_are_found_but_for_those_that_have_ended() -> None:
    shell = subprocess.Popen(["sh", "-c", "sleep 600 & echo; wait"], stdout=subprocess.PIPE)
    ended = subprocess.Popen(["true"])
    assert shell.stdout is not None
    shell.stdout.readline()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    found = find_descendants()
    try:
        assert shell.pid in found
        assert ended.pid not in found
        assert [_parent(pid) for pid in found].count(shell.pid) == 1  # sleep, named "sh" until it calls exec
    finally:
        for pid in reversed([pid for pid in found if pid == shell.pid or _parent(pid) == shell.pid]):
            os.kill(pid, signal.SIGKILL)
        shell.communicate()
        ended.wait()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
