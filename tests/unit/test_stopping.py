"""Requests to stop, in real processes: what each signal does before and in training, and the file ``stop``."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ringtrain.errors import UsageError
from ringtrain.runtime import stopping
from ringtrain.runtime.stopping import EXIT_CODE, SIGNALS, STOP_FILE, StopRequests

# Says what happens, and does what it is told to line by line.
SCRIPT = """
import hashlib, sys, threading
from pathlib import Path
from ringtrain.runtime.stopping import StopRequests

def say(*words):
    print(*words, flush=True)

others = [threading.Thread(target=threading.Event().wait, daemon=True) for _ in range(4)]
for thread in others:  # such as OpenBLAS's, which NumPy starts when it is imported: they block no signal
    thread.start()

def answer(requests):
    for line in sys.stdin:
        if line == "train\\n":
            requests.start_training(lambda reason: say("announced", reason))
        elif line == "state\\n":
            say("state", requests.reason)
        elif line == "thread\\n":
            threading.Thread(target=threading.Event().wait, daemon=True).start()  # as TensorFlow's are
        elif line == "compute\\n":
            say("computing")
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2**31 - 1)  # for minutes, in one call that holds no lock
        elif line == "leave\\n":
            return
        if line != "state\\n":
            say("done")

with StopRequests() as requests:
    requests.at_early_end(lambda reason, exit_code: say("left", reason))
    requests.watch_file(Path(sys.argv[1]))
    say("entered")
    answer(requests)
say("outside")
sys.stdin.read()
"""


class Process:
    """A process that waits for requests to stop."""

    def __init__(self, run: Path) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(run)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.read() == "entered"

    def tell(self, word: str) -> str:
        assert self.popen.stdin is not None
        print(word, file=self.popen.stdin, flush=True)
        return self.read()

    def read(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def wait_until_pending(self) -> str:
        while (state := self.tell("state")) == "state None":
            assert self.popen.poll() is None
        return state.removeprefix("state ")

    def wait_until_taken(self, number: signal.Signals) -> None:
        """Until a thread has taken a signal: another of the same number, sent before, would be lost in it."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            status = Path(f"/proc/{self.popen.pid}/status").read_text()
            [pending] = [line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:")]
            if not int(pending, 16) & 1 << number - 1:
                return
            time.sleep(0.01)
        raise AssertionError(f"nobody took {number.name}")

    def end(self) -> tuple[int, str, str]:
        """Exit code, what it said last, and its complaints."""
        said, complaint = self.popen.communicate(timeout=20)
        return self.popen.returncode, said.strip(), complaint


@pytest.fixture(autouse=True)
def listening() -> None:
    """As in a user's shell: whatever runs the tests may have been started by nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    started = Process(tmp_path)
    yield started
    started.popen.kill()
    started.popen.communicate()


# --- Before the first step ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("is_computing", [False, True])
def test_a_request_before_the_first_step_exits_at_once(
    process: Process, number: signal.Signals, is_computing: bool
) -> None:
    process.tell("thread")
    if is_computing:
        assert process.tell("compute") == "computing"
    process.popen.send_signal(number)
    reason = f"{number.name} before the first step; there was nothing to save"
    assert process.read() == f"left {reason}"
    assert process.popen.wait(20) == EXIT_CODE == 75
    assert process.end() == (75, "", "")


def test_before_the_first_step_sigusr1_is_kept_in_mind(process: Process) -> None:
    process.popen.send_signal(signal.SIGUSR1)
    assert process.wait_until_pending() == "SIGUSR1"
    assert process.tell("train") == "done"
    assert process.tell("state") == "state SIGUSR1"
    assert process.end() == (0, "outside", "")


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As after ``nohup``; a handler would take that away."""
    script = """
import os, signal
from ringtrain.runtime.stopping import StopRequests
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with StopRequests() as requests:
    os.kill(os.getpid(), signal.SIGHUP)
    requests.start_training(print)
print(requests.reason, signal.getsignal(signal.SIGHUP).name)
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "None SIG_IGN\n", "")


def test_a_process_exits_even_if_its_last_message_fails(tmp_path: Path) -> None:
    script = """
import signal
from ringtrain.runtime.stopping import StopRequests
with StopRequests() as requests:
    requests.at_early_end(lambda reason, exit_code: 1 / 0)
    print("entered", flush=True)
    signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "entered\n"
        started.terminate()
        assert started.wait(20) == EXIT_CODE


# --- In training ---


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("is_computing", [False, True])
def test_in_training_a_request_sets_a_flag_and_is_logged_once(
    process: Process, number: signal.Signals, is_computing: bool
) -> None:
    process.tell("thread")
    process.tell("train")
    if is_computing:
        assert process.tell("compute") == "computing"
    process.popen.send_signal(number)
    assert process.read() == f"announced {number.name}"
    assert process.popen.poll() is None
    if is_computing:
        return
    for _ in range(3):
        process.popen.send_signal(signal.SIGTERM)
        process.popen.send_signal(signal.SIGUSR1)
    assert process.tell("state") == f"state {number.name}"
    assert process.end() == (0, "outside", "")


@pytest.mark.parametrize("is_computing", [False, True])
def test_a_second_sigint_ends_the_process_at_once(process: Process, is_computing: bool) -> None:
    process.tell("train")
    if is_computing:
        process.tell("compute")
    process.popen.send_signal(signal.SIGINT)
    assert process.read() == "announced SIGINT"
    process.popen.send_signal(signal.SIGINT)
    assert process.popen.wait(20) == 1
    assert process.end() == (1, "left a second SIGINT, without saving", "")


def test_after_another_request_it_takes_two_sigints(process: Process) -> None:
    process.tell("train")
    process.popen.send_signal(signal.SIGTERM)
    assert process.read() == "announced SIGTERM"
    process.popen.send_signal(signal.SIGINT)
    process.wait_until_taken(signal.SIGINT)
    assert process.tell("state") == "state SIGTERM"
    process.popen.send_signal(signal.SIGINT)
    assert process.popen.wait(20) == 1
    assert process.end() == (1, "left a second SIGINT, without saving", "")


# --- The file ---


def test_the_file_is_seen_while_the_process_computes(process: Process, tmp_path: Path) -> None:
    process.tell("train")
    process.tell("compute")
    begin = time.monotonic()
    (tmp_path / STOP_FILE).touch()
    assert process.read() == f"announced the file {tmp_path / STOP_FILE}"
    assert time.monotonic() - begin < 3


def test_the_file_is_removed_so_that_the_next_run_does_not_stop(tmp_path: Path) -> None:
    (tmp_path / STOP_FILE).touch()
    with StopRequests() as requests:
        requests.watch_file(tmp_path)
        requests.clear_file()
        assert not (tmp_path / STOP_FILE).exists()
        requests.clear_file()
        assert not requests.is_pending


def test_without_a_run_directory_no_file_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / STOP_FILE).touch()
    with StopRequests() as requests:
        requests.clear_file()
    assert requests.reason is None
    assert (tmp_path / STOP_FILE).exists()


# --- With the program's own imports ---


def test_threads_started_by_imports_do_not_take_signals() -> None:
    script = """
import os, sys, threading
import ringtrain.cli
import numpy
from ringtrain.runtime.stopping import StopRequests
for number in sys.argv[1:]:
    announced = threading.Event()
    with StopRequests() as requests:
        requests.start_training(lambda reason: announced.set())
        os.kill(os.getpid(), int(number))
        announced.wait()
    print(requests.reason)
"""
    command = [sys.executable, "-c", script, *(str(int(number)) for number in SIGNALS)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=20)
    names = "".join(f"{number.name}\n" for number in SIGNALS)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, names, "")


# --- Leaving ---


def blocked_signals() -> set[Any]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_leaving_restores_the_signals_at_once() -> None:
    before = blocked_signals()
    assert before.isdisjoint(SIGNALS)
    with StopRequests() as requests:
        assert blocked_signals() == before | set(SIGNALS)
        begin = time.monotonic()
    assert time.monotonic() - begin < 0.5
    assert blocked_signals() == before
    assert not requests.is_pending


def test_leaving_restores_the_handlers() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with StopRequests():
            assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert signal.set_wakeup_fd(-1) == -1


def test_leaving_by_an_error_restores_the_signals() -> None:
    before = blocked_signals()
    with pytest.raises(ZeroDivisionError), StopRequests():
        raise ZeroDivisionError
    assert blocked_signals() == before


def test_signals_that_were_blocked_before_stay_so() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        with StopRequests():
            pass
        assert signal.SIGUSR1 in blocked_signals()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_handlers_are_restored_afterwards(process: Process, number: signal.Signals) -> None:
    process.tell("train")
    assert process.tell("leave") == "outside"
    process.popen.send_signal(number)
    assert process.popen.wait(20) == -number


def test_a_failed_announcement_does_not_lose_the_request(tmp_path: Path) -> None:
    script = """
import os, signal, threading
from ringtrain.runtime.stopping import StopRequests
announced = threading.Event()
def announce(reason):
    announced.set()
    raise OSError("no space")
with StopRequests() as requests:
    requests.start_training(announce)
    os.kill(os.getpid(), signal.SIGTERM)
    announced.wait()
    print(requests.reason, requests._thread.is_alive())
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "SIGTERM True\n", "")


def test_a_signal_to_a_child_does_not_stop_the_run() -> None:
    script = """
import multiprocessing, signal, time
from ringtrain.runtime.stopping import StopRequests
context = multiprocessing.get_context("fork")
with StopRequests() as requests:
    requests.start_training(lambda reason: None)
    child = context.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(10)
    print(child.exitcode == -signal.SIGTERM, requests.reason)
    child.kill()
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "True None\n", "")


@pytest.mark.parametrize("kind", ["directory", "link to nowhere"])
def test_a_stop_path_that_is_no_file_is_ignored(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``mkdir stop`` ended a run after its save with a traceback, and each one after it at once."""
    stop = tmp_path / STOP_FILE
    if kind == "directory":
        stop.mkdir()
        (stop / "mine").touch()
    else:
        stop.symlink_to("gone")
    looks, isfile = threading.Semaphore(0), os.path.isfile

    def look(path: str) -> bool:
        looks.release()
        return isfile(path)

    monkeypatch.setattr(stopping, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(os.path, "isfile", look)
    with StopRequests() as requests:
        requests.watch_file(tmp_path)
        assert all(looks.acquire(timeout=20) for _ in range(3))
        assert requests.reason is None
        requests.clear_file()
    assert stop.is_dir() == (kind == "directory")


def test_a_thread_is_refused() -> None:
    with ThreadPoolExecutor() as threads, pytest.raises(UsageError, match="main thread"):
        threads.submit(StopRequests().__enter__).result()


def test_a_signal_that_the_workload_has_taken_is_taken_back() -> None:
    with StopRequests() as requests:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as the user's code may, when it opens its data
        announced = threading.Event()
        requests.start_training(lambda reason: announced.set())
        os.kill(os.getpid(), signal.SIGTERM)
        assert announced.wait(30)
        assert requests.reason == "SIGTERM"
