"""Other processes: what proc(5) shows of them, the launcher among the ancestors, what commands answer, and small ones
of ringtrain's own, started aside.

It uses nothing but the standard library, since those that are started aside use it, too.
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
    """A process as it is now."""

    state: str  # the letter of proc(5), such as R for one that can run, T for one that is stopped
    parent: int
    born: int  # in ticks since the system's start: of two with the same number these differ

    @property
    def has_ended(self) -> bool:
        """True if it waits for nothing but that its parent collects it."""
        return self.state in "ZX"


def read_process(pid: int | str | None) -> Process | None:
    """A process by its number, or a thread such as ``self/task/7``; None if it is gone."""
    try:  # the second field, the name, may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
        return Process(state=fields[0], parent=int(fields[1]), born=int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def list_processes() -> list[int]:
    """The numbers of all processes that are to be seen."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def list_threads() -> set[int]:
    """The numbers that the kernel knows this process' threads by."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def find_ancestors() -> Iterator[int]:
    """The parent of this process, its parent, and so on."""
    pid = os.getppid()
    while pid:
        yield pid
        process = read_process(pid)
        pid = process.parent if process else 0


def read_words(pid: int | None, file: Literal["cmdline", "environ"]) -> list[str]:
    """The command line of a process, or the variables that it began with; nothing if it is gone, or another's."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace").split("\0")
    except OSError:
        return []


def find_launcher() -> int | None:
    """The process id of the launcher on this host that the user started, or None."""
    found = None
    for pid in find_ancestors():
        words = read_words(pid, "cmdline")
        if not words:
            break
        if is_named_launcher(words):
            found = pid
    return found


class Lineage:
    """The processes between a rank and its launcher, with the launcher, without the rank, as they were at the start."""

    def __init__(self) -> None:
        """Take this process' parent if no launcher is known by its name, such as Slurm's."""
        line = list(find_ancestors())
        named = [number for number, pid in enumerate(line) if is_launcher(read_words(pid, "cmdline"))]
        self._born = {pid: _read_birth(pid) for pid in line[: max(named, default=0) + 1]}

    def find_gone(self) -> int | None:
        """The process id of one that has ended; None if all of them live."""
        return next((pid for pid, birth in self._born.items() if birth is None or _read_birth(pid) != birth), None)


def is_launcher(words: list[str]) -> bool:
    """True if a command line is a launcher's; ``horovodrun`` becomes a shell that was given an mpirun to wait for."""
    is_shell = len(words) > 2 and os.path.basename(words[0]) in SHELLS and words[1] == "-c"
    waits_for_one = is_shell and words[2].split(" ")[0] in LAUNCHERS and not words[2].rstrip().endswith("&")
    return is_named_launcher(words) or waits_for_one


def is_named_launcher(words: list[str]) -> bool:
    """True if a command line begins with a launcher's name, perhaps behind its interpreter's."""
    return any(os.path.basename(word) in LAUNCHERS for word in words[:2])


def _read_birth(pid: int) -> int | None:
    process = read_process(pid)
    return None if process is None or process.has_ended else process.born


def ask(command: Sequence[str], *, seconds: float, **options: Any) -> tuple[int | None, str]:
    """A command's exit code and all that it prints; None, and why, if it ends too late or cannot be started."""
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
    """Start a module of ringtrain's, whose ``main`` uses the standard library alone, in a process of its own.

    It looks for no site packages (-S) nor for anything of the user's (-I), and so is there at once.
    """
    code = f"import sys; sys.path.append({PACKAGES!r}); from {__name__} import run_aside; run_aside(*sys.argv[1:])"
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code, module, *arguments], **options)


def run_aside(module: str, *arguments: str) -> None:
    """Be such a process."""
    for number in MEANT_FOR_RANK:
        signal.signal(number, signal.SIG_IGN)
    importlib.import_module(module).main(*arguments)
