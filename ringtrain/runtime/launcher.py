"""The launcher of this process: found among its ancestors, and seen to be gone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

LAUNCHERS = ("horovodrun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun")
SHELLS = ("sh", "bash", "dash")


def find_launcher() -> int | None:
    """The process id of the launcher on this host that the user started, or None."""
    found = None
    for pid in _ancestors():
        words = _read_command(pid)
        if words is None:
            break
        if any(os.path.basename(word) in LAUNCHERS for word in words[:2]):
            found = pid
    return found


class Lineage:
    """The processes between a rank and its launcher, both included but for the rank, as they were at the start."""

    def __init__(self) -> None:
        """Where no launcher is known by its name, such as Slurm's, this process' parent stands for it."""
        line = list(_ancestors())
        named = [number for number, pid in enumerate(line) if is_launcher(_read_command(pid) or [])]
        self._born = {pid: _read_birth(pid) for pid in line[: max(named, default=0) + 1]}

    def find_gone(self) -> int | None:
        """The process id of one that has ended; None where all of them live."""
        return next((pid for pid, birth in self._born.items() if birth is None or _read_birth(pid) != birth), None)


def is_launcher(words: list[str]) -> bool:
    """Whether a command line is a launcher's; ``horovodrun`` becomes a shell that was given an mpirun to wait for."""
    if any(os.path.basename(word) in LAUNCHERS for word in words[:2]):
        return True
    is_shell = len(words) > 2 and os.path.basename(words[0]) in SHELLS and words[1] == "-c"
    return is_shell and words[2].split(" ")[0] in LAUNCHERS and not words[2].rstrip().endswith("&")


def _ancestors() -> Iterator[int]:
    """The parent of this process, its parent, and so on."""
    pid = os.getppid()
    while pid > 1:
        yield pid
        fields = _read_status(pid)
        if fields is None:
            return
        pid = int(fields[1])


def _read_command(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return None


def _read_birth(pid: int) -> str | None:
    """When a process began, in ticks since the system's start; None where it is gone, or waits for its parent only."""
    fields = _read_status(pid)
    return None if fields is None or fields[0] in "ZX" else fields[19]


def _read_status(pid: int) -> list[str] | None:
    """The fields of proc(5)'s ``stat`` from the third on, the state; the second, the name, may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
