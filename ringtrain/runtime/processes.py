"""Other processes: proc(5), launchers, commands, and helpers.

Standard library only, since the helpers use it.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

MEANT_FOR_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PACKAGES = str(Path(__file__).resolve().parents[2])
LAUNCHERS = ("horovodrun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun")
SHELLS = ("sh", "bash", "dash")


class Process(NamedTuple):
    state: str  # letter of proc(5): R running, T stopped
    parent: int
    born: int  # start in ticks since boot; distinguishes reused pids

    @property
    def has_ended(self) -> bool:
        """True for zombies."""
        return self.state in "ZX"


def read_process(pid: int | str | None) -> Process | None:
    """``pid`` may be a thread, such as ``self/task/7``. None if it has gone."""
    try:  # the name, field 2, may contain anything
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
        return Process(state=fields[0], parent=int(fields[1]), born=int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def list_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def list_threads() -> set[int]:
    """Return kernel thread ids."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def find_ancestors() -> Iterator[int]:
    """Yield the nearest first."""
    pid = os.getppid()
    while pid:
        yield pid
        process = read_process(pid)
        pid = process.parent if process else 0


def read_words(pid: int | None, file: Literal["cmdline", "environ"]) -> list[str]:
    """Return nothing if the process has gone or is another user's."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace").split("\0")
    except OSError:
        return []


def find_launcher() -> int | None:
    """Return the outermost launcher's pid on this host."""
    found = None
    for pid in find_ancestors():
        words = read_words(pid, "cmdline")
        if not words:
            break
        if is_named_launcher(words):
            found = pid
    return found


class Lineage:
    """Processes from a rank's parent to its launcher, as at the start."""

    def __init__(self) -> None:
        """Without a launcher known by name, such as Slurm's, watch the parent."""
        line = list(find_ancestors())
        named = [number for number, pid in enumerate(line) if is_launcher(read_words(pid, "cmdline"))]
        self._born = {pid: _read_birth(pid) for pid in line[: max(named, default=0) + 1]}

    def find_gone(self) -> int | None:
        """Return the pid of a process that has exited."""
        return next((pid for pid, birth in self._born.items() if birth is None or _read_birth(pid) != birth), None)


def is_launcher(words: list[str]) -> bool:
    """``horovodrun`` becomes a shell that waits for mpirun."""
    is_shell = len(words) > 2 and os.path.basename(words[0]) in SHELLS and words[1] == "-c"
    waits_for_one = is_shell and words[2].split(" ")[0] in LAUNCHERS and not words[2].rstrip().endswith("&")
    return is_named_launcher(words) or waits_for_one


def is_named_launcher(words: list[str]) -> bool:
    """Accept a name after an interpreter's."""
    return any(os.path.basename(word) in LAUNCHERS for word in words[:2])


def _read_birth(pid: int) -> int | None:
    process = read_process(pid)
    return None if process is None or process.has_ended else process.born


def ask(command: Sequence[str], *, seconds: float, **options: Any) -> tuple[int | None, str]:
    """Return exit code and output; None and the reason on failure."""
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, **options}
    try:
        finished = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, errors="replace", timeout=seconds, **options
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer after {seconds:.0f} s"
    except OSError as error:
        return None, str(error)
    return finished.returncode, finished.stdout


def start_aside(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Call a module's ``main``; fast: standard library only (-S), isolated (-I)."""
    code = f"import sys; sys.path.append({PACKAGES!r}); from {__name__} import run_aside; run_aside(*sys.argv[1:])"
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code, module, *arguments], **options)


def run_aside(module: str, *arguments: str) -> None:
    for number in MEANT_FOR_RANK:
        signal.signal(number, signal.SIG_IGN)
    importlib.import_module(module).main(*arguments)
