"""``python -I -S leftovers.py NAME SECONDS PID...``: a process that ends what outlives a rank and holds its launcher.

A launcher such as mpirun waits until nobody can write to a rank's output any more: a process that the user's code has
started and left alone has that as well. Most helpers end with the process that they serve, so this one begins to count
when that is gone, and only what is still there after so many seconds is named and killed.

It uses nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

OUTPUT = (1, 2)  # the descriptors
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "HOROVOD_RANK")  # see ``ringtrain.runtime.world``
TICK_SECONDS = 0.5
LONGEST_COMMAND = 80  # characters


def hand_over(name: str, timeout: float) -> None:
    """Leave those that hold this process' output, where there are any, to a process that outlives this one as well."""
    pids = find_holders(os.environ)
    if pids:
        with contextlib.suppress(OSError):
            subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, name, f"{timeout:g}", *map(str, pids)],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )


def find_holders(environ: Mapping[str, str]) -> list[int]:
    """The processes of this rank that write to its launcher, as it does; those that it came of are none."""
    rank = {f"{name}={environ[name]}" for name in RANK_VARIABLES if name in environ}
    output = set(_output_of(os.getpid()))
    others = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()} - set(_line_of(os.getpid()))
    return sorted(pid for pid in others if output & set(_output_of(pid)) and rank and rank <= _environment_of(pid))


def read_command(pid: int | None) -> str:
    """The command line of a process, not all of one that is long."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return "gone"
    words = "".join(sign if sign.isprintable() else "?" for sign in words)  # it must pass for nothing of ours
    return words if len(words) <= LONGEST_COMMAND else f"{words[:LONGEST_COMMAND]}..."


def main(name: str, timeout: float, pids: list[int]) -> None:
    """Wait for the end of the parent, then for that of these, and end those that are left."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(TICK_SECONDS)
    left = timeout
    while pids and left > 0:
        time.sleep(TICK_SECONDS)
        left -= TICK_SECONDS
        pids = [pid for pid in pids if set(_output_of(os.getpid())) & set(_output_of(pid))]
    if not pids:
        return
    commands = ", ".join(f"{pid} ({read_command(pid)})" for pid in pids)
    message = (
        f"{name} has left processes that hold its output, for which the launcher waits: {commands}. They are ended, "
        f"{timeout:g} s after it. Give such a process an output of its own, or raise --exit_timeout."
    )
    with contextlib.suppress(OSError):
        os.write(2, f"ringtrain: warning: {message}\n".encode())
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _output_of(pid: int) -> Iterator[str]:
    """The pipes and terminals that a process writes to, as far as it may be known."""
    for descriptor in OUTPUT:
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if link.startswith(("pipe:", "/dev/pts/")):
                yield link


def _environment_of(pid: int) -> set[str]:
    """The variables that a process began with."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"))
    except OSError:
        return set()


def _line_of(pid: int) -> Iterator[int]:
    """A process, its parent, and so on."""
    while pid > 0:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            return


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # meant for the rank
        signal.signal(number, signal.SIG_IGN)
    main(sys.argv[1], float(sys.argv[2]), [int(pid) for pid in sys.argv[3:]])
