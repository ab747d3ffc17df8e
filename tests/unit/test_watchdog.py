"""The watchdog of a process alone: what hangs is ended with a name, what was stopped goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from ringtrain.runtime import activity
from ringtrain.runtime.activity import Phase, current, set_phase
from ringtrain.runtime.world import World
from ringtrain.watchdog.hub import MAX_LINE_BYTES
from ringtrain.watchdog.stacks import MAX_GROUPS, find_user_frame, group_stacks, read_stacks, write_stacks
from tests.world.processes import REPOSITORY

PROGRAM = """
import ctypes, os, sys, threading, time
from ringtrain.runtime import activity
from ringtrain.runtime.activity import Phase
from ringtrain.watchdog.thread import Watchdog
from ringtrain.runtime.world import World

world = World(rank=0, size=1, local_rank=0, local_size=1, node="n1", launcher="no launcher")
watchdog = Watchdog(
    world, LIMIT, report=lambda error: print(error, flush=True), warn=lambda text: print("WARNED", text, flush=True)
)
watchdog.write_by(write_end=lambda error: print("RECORDED", list(error.stacks), flush=True), warn=None)
watchdog.start()
activity.set_phase(Phase.STEP, 7)


def move_for(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        activity.set_phase(Phase.STEP, 7)
        time.sleep(0.01)


def wait_with_the_lock():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


print("READY", flush=True)
"""


class Program:
    """A process with a watchdog, of one second as a rule, that goes on as a test says."""

    def __init__(self, body: str, tmp_path: Path, limit: float = 1.0) -> None:
        self.told = tmp_path / "told"
        self.told.mkdir()
        self.popen = subprocess.Popen(
            [sys.executable, "-c", f"LIMIT = {limit}\n{PROGRAM}{body}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "RINGTRAIN_LAUNCH_DIR": str(self.told)},
        )
        assert self.popen.stdout is not None
        line = b""  # byte by byte: what a buffer holds besides the line, communicate would not see
        while not line.endswith(b"\n"):
            line += os.read(self.popen.stdout.fileno(), 1) or b"ended\n"
        assert line == b"READY\n"

    def end(self) -> tuple[int, str, str]:
        out, err = self.popen.communicate(timeout=30)
        return self.popen.returncode, out, err


Start = Callable[..., Program]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Start]:
    started: list[Program] = []

    def start(body: str, **options: float) -> Program:
        started.append(Program(body, tmp_path, **options))
        return started[-1]

    yield start
    for program in started:
        program.popen.kill()
        program.popen.wait()


def test_a_hang_exits_with_its_phase_and_stacks(run: Start) -> None:
    code, out, err = run("time.sleep(30)").end()
    assert code == 6
    assert re.search(r"nothing has moved for 1 s: rank 0 on n1 is in step 7 \(1 s\)\.", out)
    assert "raise --hang_timeout (1 s)" in out
    assert out.startswith("RECORDED [{'ranks': [0], 'text': 'Thread MainThread (most recent call first):")
    assert "ringtrain: rank 0 on n1 is here:" in err
    assert 'File "<string>"' in err


def as_watchdog(look: Callable[[], str]) -> str:
    """Look from a thread of the watchdog's name."""
    found: list[str] = []
    watchdog = threading.Thread(target=lambda: found.append(look()), name="watchdog")
    watchdog.start()
    watchdog.join()
    return found[0]


def test_stacks_for_a_record_are_bounded_and_grouped() -> None:
    def read(depth: int) -> str:
        if depth:
            return read(depth - 1)
        return as_watchdog(read_stacks)

    whole, cut = read(0), read(200)
    assert whole.startswith("Thread MainThread (most recent call first):\n  File ")
    assert cut.endswith("\n  ...")
    assert len(json.dumps({"stacks": cut})) < MAX_LINE_BYTES
    groups = group_stacks({2: "waits", 0: "waits", 1: "sleeps"})
    assert groups == [{"ranks": [1], "text": "sleeps"}, {"ranks": [0, 2], "text": "waits"}]
    assert len(group_stacks({rank: f"at {rank}" for rank in range(50)})) == MAX_GROUPS


def test_a_rank_that_never_heard_of_rank_0_ends_by_itself(run: Start) -> None:
    """Such as where rank 0 was stopped before its first word; what takes long is given its time first."""
    body = """
activity.LONG_SECONDS = 2.0
watchdog._world = World(rank=1, size=2, local_rank=1, local_size=2, node="n1", launcher="mpirun")
watchdog._nodes, watchdog._has_met, watchdog._unheard = ["n1", "n1"], True, {0}
activity.set_phase(Phase.MEET)
time.sleep(30)
"""
    code, out, _ = run(body).end()
    assert code == 6
    assert re.search(r"nothing has moved for 2 s: rank 1 on n1 waits for the other ranks \(2 s\); ", out)
    assert "; nothing was heard of rank 0 on n1. " in out


def test_last_words_that_hang_as_well_do_not_keep_it(run: Start) -> None:
    body = """
from ringtrain.watchdog import thread as module
module.RECORD_SECONDS = 0.5
watchdog.write_by(write_end=lambda error: time.sleep(600), warn=None)
time.sleep(30)
"""
    code, out, _ = run(body).end()
    assert code == 6
    assert "is in step 7" in out


def test_a_call_that_holds_pythons_lock_is_ended_from_outside(run: Start) -> None:
    program = run("move_for(0.5)\nwait_with_the_lock()")
    code, _, err = program.end()
    assert code == -signal.SIGKILL
    assert "rank 0 on n1 is in step 7; no other thread of it has run for 1 s. Its threads:" in err
    assert "in wait_with_the_lock" in err
    assert "a call holds Python's lock" in err
    assert json.loads((program.told / "end.json").read_text())["exit_code"] == 6


HUNG_RECORD = """
import os, time
from ringtrain.watchdog import outside

outside.RECORD_SECONDS, outside.record_end = 0.3, lambda values: time.sleep(60)
reader, writer = os.pipe()
if os.fork() == 0:
    os.dup2(reader, 0)
    os.close(writer)
    outside.main("rank 0 on n1", "0")
    os._exit(0)
os.write(writer, b"0.2 is in step 7\\n")
time.sleep(30)
"""


def test_a_rank_is_killed_though_its_last_record_hangs() -> None:
    command = [sys.executable, "-c", HUNG_RECORD]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20)
    assert finished.returncode == -signal.SIGKILL
    assert "rank 0 on n1 is in step 7; no other thread of it has run for 0 s: a call" in finished.stderr


def test_progress_is_not_interrupted(run: Start) -> None:
    body = "move_for(1.5)\nfor _ in range(6): time.sleep(0.25); activity.move()"
    code, out, err = run(f"{body}\nwatchdog.begin_leaving(0)\nwatchdog.stop()\nprint('ENDED')").end()
    assert (code, out, err) == (0, "ENDED\n", "")


def test_a_process_suspended_for_long_continues(run: Start) -> None:
    """A debugger, or Slurm that suspends a job: the clocks have gone on, the process has not."""
    program = run("move_for(3)\nwatchdog.stop()\nprint('ENDED')")
    for _ in range(2):
        program.popen.send_signal(signal.SIGSTOP)
        time.sleep(2)  # twice the limit; and more than that after which it is ended from outside
        program.popen.send_signal(signal.SIGCONT)
        time.sleep(0.3)
    assert program.end() == (0, "ENDED\n", "")


def test_the_time_for_which_a_process_is_stopped_does_not_count(run: Start) -> None:
    """Not even where it did not move before, and does not at once afterwards."""
    program = run("move_for(0.3)\nprint('STILL', flush=True)\nsys.stdin.readline()\nwatchdog.stop()", limit=2.5)
    assert program.popen.stdout is not None
    assert program.popen.stdin is not None
    assert program.popen.stdout.readline() == "STILL\n"
    time.sleep(0.4)
    program.popen.send_signal(signal.SIGSTOP)
    time.sleep(5)
    program.popen.send_signal(signal.SIGCONT)
    time.sleep(0.4)
    program.popen.stdin.write("\n")
    assert program.end() == (0, "", "")


def test_who_debugs_may_take_any_time(run: Start) -> None:
    body = """
import pdb
threading.Timer(2.5, lambda: print("STILL HERE", flush=True)).start()
class Prompt(pdb.Pdb):
    def cmdloop(self, intro=None):
        time.sleep(2)
        self.do_continue("")
Prompt(stdout=open(os.devnull, "w")).set_trace()
x = 1
move_for(1)
watchdog.stop()
"""
    code, out, _ = run(body).end()
    assert (code, out) == (0, "STILL HERE\n")


def test_a_way_out_that_hangs_ends_with_the_code_of_the_run(run: Start) -> None:
    body = """
from ringtrain.watchdog import thread as module
module.LEAVE_SECONDS = 0.5
watchdog.begin_leaving(3, lambda: print("WORDS", flush=True))
time.sleep(30)
"""
    code, out, _ = run(body).end()
    assert (code, out) == (3, "WORDS\n")


def test_a_defect_of_the_watchdog_ends_no_run(run: Start) -> None:
    body = """
watchdog._judge = lambda seconds: 1 / 0
time.sleep(1.5)
watchdog.begin_leaving(0)
watchdog.stop()
print("ENDED")
"""
    code, out, err = run(body, limit=0.5).end()
    assert code == 0
    assert "WARNED the watchdog of rank 0 has failed" in out
    assert out.endswith("ENDED\n")
    assert not err


def test_any_process_may_ask_for_the_stacks(run: Start) -> None:
    program = run("move_for(1)\nwatchdog.stop()")
    time.sleep(0.2)
    program.popen.send_signal(signal.SIGRTMIN + 6)
    code, _, err = program.end()
    assert code == 0
    assert "in move_for" in err


def test_each_note_and_each_move_is_seen() -> None:
    set_phase(Phase.STEP, 3)
    before = current()
    assert current()[0] is before[0]
    set_phase(Phase.STEP, 3)
    assert current()[0] is not before[0]
    before = current()
    activity.move()
    assert current()[1] != before[1]


def test_a_rank_returns_to_its_phase_after_a_meeting() -> None:
    set_phase(Phase.PREPARE, takes_long=True)
    before = current()
    with activity.meeting():
        inside = current()[0]
    assert (inside.doing, inside.takes_long) == (Phase.MEET, True)
    assert current()[0] is before[0]
    assert current()[1] != before[1]


def test_a_long_phase_has_at_least_ten_minutes() -> None:
    assert activity.limit_seconds(4, takes_long=False) == 4
    assert activity.limit_seconds(4, takes_long=True) == activity.LONG_SECONDS == 600
    assert activity.limit_seconds(1000, takes_long=True) == 1000


def test_the_end_of_a_long_phase_is_announced_at_once() -> None:
    told = []
    activity.when_it_may_not_take_long(lambda: told.append(current()[0].step))
    try:
        set_phase(Phase.STEP, 1, takes_long=True)
        set_phase(Phase.STEP, 2, takes_long=True)
        set_phase(Phase.DATA, 3)
        set_phase(Phase.STEP, 3)
        set_phase(Phase.SAVE, 4, takes_long=True)
        set_phase(Phase.DATA, 4)
    finally:
        activity.when_it_may_not_take_long(None)
    assert told == [3, 4]


def test_a_rank_s_word_does_not_wait_for_the_next_tick(run: Start) -> None:
    body = """
watchdog._tick = 3600.0
watchdog._star.wake()  # the tick that is under way is short
time.sleep(0.5)
told = threading.Semaphore(0)
watchdog._outside.tell = lambda limit, words: told.release() if words == "is in step 9" else None
activity.set_phase(Phase.SAVE, 8, takes_long=True)
activity.set_phase(Phase.STEP, 9)
print("TOLD" if told.acquire(timeout=20) else "SILENT", flush=True)
watchdog.stop()
"""
    _, out, _ = run(body, limit=60.0).end()
    assert out == "TOLD\n"


def test_a_rank_is_sampled_once_a_tick_however_often_woken() -> None:
    """At the moment when the training thread wakes it, that thread is at work on any rank."""
    body = """
end = time.monotonic() + 2
while time.monotonic() < end:
    activity.set_phase(Phase.SAVE, 7, takes_long=True)
    activity.set_phase(Phase.STEP, 7)
    time.sleep(0.01)
print(watchdog._looks.times, flush=True)
os._exit(0)
"""
    program = f"LIMIT = 1.0\n{PROGRAM.replace('size=1', 'size=2')}{body}"
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert finished.returncode == 0, finished.stderr
    num_ticks = 2 / 0.125
    assert num_ticks / 4 <= int(finished.stdout.split()[-1]) <= num_ticks + 1


def test_the_user_s_line_is_found_in_a_removed_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", mock.Mock(side_effect=FileNotFoundError))
    assert as_watchdog(find_user_frame).startswith(f"{Path(__file__)}:")


def test_the_user_s_line_is_found_and_own_threads_are_skipped(capfd: pytest.CaptureFixture[str]) -> None:
    """They are those of the other threads, such as the watchdog's own finds them."""
    is_over = threading.Event()

    def look() -> str:
        write_stacks(World(rank=0, size=1, local_rank=0, local_size=1, node="n1", launcher="no launcher"))
        return find_user_frame()

    threads = [threading.Thread(target=is_over.wait, name=name) for name in ("lease", "reader of the user")]
    for thread in threads:
        thread.start()
    found = as_watchdog(look)
    is_over.set()
    for thread in threads:
        thread.join()
    here = as_watchdog.__name__  # in which this thread waits
    assert re.fullmatch(rf"tests/unit/test_watchdog\.py:\d+ \({here}\)", found)
    text = capfd.readouterr().err
    assert re.search(rf'tests/unit/test_watchdog\.py", line \d+ in {here}\n', text)
    assert "Thread reader of the user (" in text
    assert "lease" not in text
    assert "find_user_frame" not in text
