"""Start the processes of a contender, and leave none behind: within a time limit, wherever they moved to.

Launchers open sessions and leave orphans: neither pids nor process groups identify a run. So each run has a mark in its
environment, which its processes inherit.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.contenders import DIRECTORY, PORT, Command, Finished

MARK = "RINGTRAIN_BENCH_MARK"
LAST_LINES = 12
END_SECONDS = 10.0
FIRST_STEP_LINE = re.compile(r"step \d+, loss")
# Set by a launcher around the benchmark, or changing a contender's speed.
FOREIGN = (
    "OMPI_", "PMIX_", "PMI_", "HOROVOD_", "SLURM_", "TF_", "OMP_", "KMP_", "XLA_",
    "KERAS_BACKEND", "PYTHONWARNINGS", "GLIBC_TUNABLES",
)  # fmt: skip


class ChildFailedError(Exception):
    """Failure or timeout; the message ends with the process's last lines."""


def clean_environment(environ: Mapping[str, str], *, programs: Path) -> dict[str, str]:
    """Remove settings of launchers and TensorFlow; put ``programs`` first in PATH."""
    kept = {name: value for name, value in environ.items() if not name.startswith(FOREIGN)}
    path = os.pathsep.join([str(programs), kept.get("PATH", os.defpath)])
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**kept, **allowed, "PATH": path, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}


def fill_in(command: Command, directory: Path, ports: Sequence[int]) -> Command:
    def fill(text: str) -> str:
        for number, port in enumerate(ports):
            text = text.replace(PORT % number, str(port))
        return text.replace(DIRECTORY, str(directory))

    return Command(argv=tuple(map(fill, command.argv)), env={name: fill(value) for name, value in command.env.items()})


def run_together(
    commands: Sequence[Command], directory: Path, *, env: Mapping[str, str], cwd: Path, timeout: float
) -> Finished:
    """Run the processes of a contender; none remains on return."""
    mark = str(uuid.uuid4())
    ports = find_free_ports(len(commands))
    start = time.monotonic()
    children: list[_Child] = []
    try:
        for command in commands:
            children.append(_Child(fill_in(command, directory, ports), {**env, MARK: mark}, cwd, start))
        for child in children:
            child.wait(start + timeout - time.monotonic(), timeout)
    finally:
        end_marked(mark)
        for child in children:
            child.close()
    seen = [child.sec_until_first_step for child in children if child.sec_until_first_step is not None]
    return Finished(directory=directory, sec_until_first_step=min(seen, default=None))


class _Child:
    def __init__(self, command: Command, env: Mapping[str, str], cwd: Path, start: float) -> None:
        self.sec_until_first_step: float | None = None
        self._program = Path(command.argv[0]).name
        self._start = start
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._popen = subprocess.Popen(
            command.argv,
            env={**env, **command.env},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self, seconds: float, timeout: float) -> None:
        try:
            code = self._popen.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            raise ChildFailedError(f"{self._program} was not done after {timeout:.0f} s; {self._last()}") from None
        if code:
            self._reader.join(END_SECONDS)
            raise ChildFailedError(f"{self._program} ended with {code}; {self._last()}")

    def close(self) -> None:
        """Call it after all processes have ended."""
        self._popen.wait()
        self._reader.join(END_SECONDS)
        if self._popen.stdout is not None and not self._reader.is_alive():
            self._popen.stdout.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            if self.sec_until_first_step is None and FIRST_STEP_LINE.search(line):
                self.sec_until_first_step = time.monotonic() - self._start
            self._lines.append(line.rstrip())

    def _last(self) -> str:
        return "its last lines:\n" + "\n".join(f"    {line}" for line in self._lines)


def end_marked(mark: str) -> None:
    """Kill all processes of a run, repeatedly, as they may start more."""
    end = time.monotonic() + END_SECONDS
    while (pids := list(_find_marked(mark))) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)  # for killed processes to exit


def _find_marked(mark: str) -> Iterator[int]:
    """Exclude zombies, whose environment is empty."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def find_free_ports(count: int) -> list[int]:
    """On the loopback interface."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
