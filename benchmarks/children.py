"""Start the processes of a contender, and leave none behind: within a time limit, wherever they moved to.

Launchers open sessions of their own and leave orphans, so that neither a pid nor a process group says what belongs to
a run. Each run therefore carries a mark in its environment, which all that it starts inherits.
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
# Of a launcher around the benchmark, and what would change a contender's speed behind its back.
FOREIGN = (
    "OMPI_", "PMIX_", "PMI_", "HOROVOD_", "SLURM_", "TF_", "OMP_", "KMP_", "XLA_",
    "KERAS_BACKEND", "PYTHONWARNINGS", "GLIBC_TUNABLES",
)  # fmt: skip


class ChildFailedError(Exception):
    """A contender's process failed, or took too long; the message ends in its last lines."""


def clean_environment(environ: Mapping[str, str], *, programs: Path) -> dict[str, str]:
    """What a user's shell holds, ``programs`` first in PATH, without settings of the launchers and of TensorFlow."""
    kept = {name: value for name, value in environ.items() if not name.startswith(FOREIGN)}
    path = os.pathsep.join([str(programs), kept.get("PATH", os.defpath)])
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**kept, **allowed, "PATH": path, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}


def fill_in(command: Command, directory: Path, ports: Sequence[int]) -> Command:
    """A command with the directory and the ports of one run."""

    def fill(text: str) -> str:
        for number, port in enumerate(ports):
            text = text.replace(PORT % number, str(port))
        return text.replace(DIRECTORY, str(directory))

    return Command(argv=tuple(map(fill, command.argv)), env={name: fill(value) for name, value in command.env.items()})


def run_together(
    commands: Sequence[Command], directory: Path, *, env: Mapping[str, str], cwd: Path, timeout: float
) -> Finished:
    """Run the processes of a contender to their end; all of them have ended when this returns."""
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
    """A process whose output is read as it comes."""

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
        """Once all processes have ended."""
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
    """Kill all processes of a run that still live: some while after the first have been, where those had started more.

    A launcher that has ended well has ended its ranks; where it failed, or took too long, nothing is worth saving.
    """
    end = time.monotonic() + END_SECONDS
    while (pids := list(_find_marked(mark))) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)  # a killed process takes a moment to go


def _find_marked(mark: str) -> Iterator[int]:
    """The living processes with this mark; one that has ended has no environment any more."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def find_free_ports(count: int) -> list[int]:
    """Ports of the loopback that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
