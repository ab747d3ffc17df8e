"""Start a command, and end or await all processes that come of it, wherever they moved to.

Launchers replace themselves, open sessions of their own and leave orphans, so that neither a pid nor a process group
says what belongs to a run. Each command therefore carries a mark in its environment, which all that it starts inherits.
So does a job that it hands to Slurm, which is meant to outlive it: `OF_A_JOB` tells those.
"""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.world.fork_server import SERVERS

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = "RINGTRAIN_TEST_MARK"
BACKEND = "RINGTRAIN_TEST_BACKEND"  # by which ranks communicate where a test does not say it itself, such as "horovod"
OF_A_JOB = "ENVIRONMENT=BATCH"  # what Slurm adds to the environment that sbatch passes on
TERMINAL_COLUMNS = 80
# Of another launcher around the tests, or of what the test process itself needed.
FOREIGN_VARIABLES = ("TF_CPP_MIN_LOG_LEVEL", "KERAS_BACKEND", "PYTHONWARNINGS", "ENVIRONMENT")
FOREIGN_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "HOROVOD_", "SLURM_")


def clean_environment(**more: str) -> dict[str, str]:
    """The environment of a user who starts a run, with this interpreter's programs first in PATH."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN_VARIABLES and not name.startswith(FOREIGN_PREFIXES)
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept | {"PATH": path, "NVIDIA_TF32_OVERRIDE": "0"} | as_root | more  # on a GPU float32 has its own rounding


def by_chosen_backend(command: Sequence[str]) -> list[str]:
    """The command; where it starts ranks that train, by the backend that the environment names, if it names one."""
    words, backend = [*map(str, command)], os.environ.get(BACKEND)
    after = words.index("ringtrain") + 1 if "ringtrain" in words else len(words)
    trains = words[0] in ("mpirun", "horovodrun", "srun", "nsenter") and words[after : after + 1] != []
    if backend and trains and words[after].startswith("--") and "--backend" not in words:
        words[after:after] = ["--backend", backend]
    return words


class MarkedProcess:
    """A running command and all processes that came of it, but for those of a job that it has submitted."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], *, cwd: Path = REPOSITORY, **options: Any
    ) -> None:
        env = SERVERS.environment(env)
        self._mark = f"{MARK}={uuid.uuid4()}"
        name, value = self._mark.split("=")
        self.popen: subprocess.Popen[bytes] = subprocess.Popen(
            by_chosen_backend(command),
            env={**env, name: value},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )

    def pids(self) -> list[int]:
        """The living processes of this command."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if self._is_mine(pid)]

    def end(self) -> None:
        """End all of them: mpirun politely, so that it tidies up, then what remains by force."""
        launchers = [pid for pid in self.pids() if _name(pid) == "mpirun"]
        _signal_all(launchers, signal.SIGTERM)
        end = time.monotonic() + 5
        for pid in launchers:
            _wait_for_exit(pid, end - time.monotonic())
        while remaining := self.pids():
            _signal_all(remaining, signal.SIGKILL)
            self.wait_until_gone(5)
        self.popen.wait()

    def wait_until_gone(self, timeout: float) -> bool:
        """Wait until none of them lives; False when some still do after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while pids := self.pids():
            if self.popen.pid in pids:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.popen.wait(max(0.0, end - time.monotonic()))
            else:
                _wait_for_exit(pids[0], end - time.monotonic())
            if time.monotonic() >= end:
                break
        self.popen.poll()
        return not self.pids()

    def _is_mine(self, pid: int) -> bool:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return self._mark.encode() in variables and OF_A_JOB.encode() not in variables


@dataclass(frozen=True)
class Finished:
    """How a command ended.

    Attributes:
        rc: exit status.
        stdout: its output; what a terminal was sent, where there was one.
        stderr: its error stream; empty where there was a terminal.
        left_behind: whether processes of it lived on after the launcher ended.
        seconds: wall-clock time.
    """

    rc: int
    stdout: str
    stderr: str
    left_behind: bool
    seconds: float


def run_command(
    command: Sequence[str], *, env: Mapping[str, str], timeout: float, terminal: bool = False, cwd: Path = REPOSITORY
) -> Finished:
    """Run a command to its end; none of its processes lives when this returns.

    Args:
        terminal: give it a pseudo-terminal for both streams.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds; the error carries what it wrote until then.
    """
    start = time.monotonic()
    process, streams = (_start_on_terminal if terminal else _start_on_pipes)(command, env, cwd)
    try:
        outputs = _read_until_exit(process, streams, start + timeout)
        is_in_time = process.popen.returncode is not None
        left_behind = is_in_time and not process.wait_until_gone(5)
    finally:
        process.end()
        for stream in streams:
            stream.close()
    texts = [output.decode(errors="replace") for output in outputs]
    if not is_in_time:
        raise subprocess.TimeoutExpired(list(command), timeout, *(text.encode() for text in texts))
    stdout, stderr = [*texts, ""][:2]
    return Finished(process.popen.returncode, stdout, stderr, left_behind, time.monotonic() - start)


def _start_on_pipes(command: Sequence[str], env: Mapping[str, str], cwd: Path) -> tuple[MarkedProcess, list[IO[bytes]]]:
    process = MarkedProcess(command, env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.popen.stdout is not None
    assert process.popen.stderr is not None
    return process, [process.popen.stdout, process.popen.stderr]


def _start_on_terminal(
    command: Sequence[str], env: Mapping[str, str], cwd: Path
) -> tuple[MarkedProcess, list[IO[bytes]]]:
    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, TERMINAL_COLUMNS, 0, 0))
    process = MarkedProcess(command, env, cwd=cwd, stdout=inside, stderr=inside)
    os.close(inside)
    return process, [os.fdopen(outside, "rb", buffering=0)]


def _read_until_exit(process: MarkedProcess, streams: Sequence[IO[bytes]], end: float) -> list[bytes]:
    """What the command wrote to each stream until it ended, or until the time was up."""
    exited = os.pidfd_open(process.popen.pid)
    outputs = {stream.fileno(): bytearray() for stream in streams}
    open_streams, is_running = set(outputs), True
    try:
        while is_running and time.monotonic() < end:
            readable, _, _ = select.select([*open_streams, exited], [], [], max(0.0, end - time.monotonic()))
            is_running = exited not in readable
            for descriptor in open_streams.intersection(readable):
                if not _read_some(descriptor, outputs[descriptor]):
                    open_streams.discard(descriptor)
        while ready := select.select(list(open_streams), [], [], 0)[0]:  # written before the end, and not yet read
            for descriptor in ready:
                if not _read_some(descriptor, outputs[descriptor]):
                    open_streams.discard(descriptor)
    finally:
        os.close(exited)
    if not is_running:
        process.popen.wait()
    return [bytes(outputs[stream.fileno()]) for stream in streams]


def _read_some(descriptor: int, output: bytearray) -> bool:
    """Read what is there; False at the end of the stream."""
    try:
        data = os.read(descriptor, 65536)
    except OSError:  # a pseudo-terminal whose other end has closed
        return False
    output += data
    return bool(data)


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait_for_exit(pid: int, timeout: float) -> None:
    """Wait for a process that need not be a child of ours."""
    try:
        exited = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([exited], [], [], max(0.0, timeout))
    finally:
        os.close(exited)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
