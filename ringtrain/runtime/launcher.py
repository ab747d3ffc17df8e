"""The launcher of this process: found among its ancestors, and seen to be gone."""

from __future__ import annotations

import os

from ringtrain.runtime.processes import find_ancestors, read_process, read_words

LAUNCHERS = ("horovodrun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun")
SHELLS = ("sh", "bash", "dash")


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
    """The processes between a rank and its launcher, both included but for the rank, as they were at the start."""

    def __init__(self) -> None:
        """Where no launcher is known by its name, such as Slurm's, this process' parent stands for it."""
        line = list(find_ancestors())
        named = [number for number, pid in enumerate(line) if is_launcher(read_words(pid, "cmdline"))]
        self._born = {pid: _read_birth(pid) for pid in line[: max(named, default=0) + 1]}

    def find_gone(self) -> int | None:
        """The process id of one that has ended; None where all of them live."""
        return next((pid for pid, birth in self._born.items() if birth is None or _read_birth(pid) != birth), None)


def is_launcher(words: list[str]) -> bool:
    """Whether a command line is a launcher's; ``horovodrun`` becomes a shell that was given an mpirun to wait for."""
    is_shell = len(words) > 2 and os.path.basename(words[0]) in SHELLS and words[1] == "-c"
    waits_for_one = is_shell and words[2].split(" ")[0] in LAUNCHERS and not words[2].rstrip().endswith("&")
    return is_named_launcher(words) or waits_for_one


def is_named_launcher(words: list[str]) -> bool:
    """Whether a command line begins with a launcher's name, perhaps behind its interpreter's."""
    return any(os.path.basename(word) in LAUNCHERS for word in words[:2])


def _read_birth(pid: int) -> int | None:
    process = read_process(pid)
    return None if process is None or process.has_ended else process.born
