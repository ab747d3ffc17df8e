"""A helper process (``main``) that kills processes which outlive a rank and hold its launcher.

mpirun waits until no process can write to a rank's output, also background processes of user code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping

from ringtrain.runtime.processes import find_ancestors, list_processes, read_words, start_aside

OUTPUT = (1, 2)
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "HOROVOD_RANK")
TICK_SECONDS = 0.5
LONGEST_COMMAND = 80  # characters


def hand_over(name: str, timeout: float) -> None:
    pids = find_holders(os.environ)
    if pids:
        with contextlib.suppress(OSError):
            arguments = [name, f"{timeout:g}", *map(str, (os.getpid(), *pids))]
            start_aside(__name__, *arguments, stdin=subprocess.DEVNULL, start_new_session=True)


def find_holders(environ: Mapping[str, str]) -> list[int]:
    """Exclude ancestors."""
    rank = {f"{name}={environ[name]}" for name in RANK_VARIABLES if name in environ}
    output = set(_output_of(os.getpid()))
    others = set(list_processes()) - {os.getpid(), *find_ancestors()}
    holders = [pid for pid in others if output & set(_output_of(pid))]
    return sorted(pid for pid in holders if rank and rank.issubset(read_words(pid, "environ")))


def describe_command(pid: int | None) -> str:
    words = " ".join(read_words(pid, "cmdline")).strip() or "gone"
    words = "".join(sign if sign.isprintable() else "?" for sign in words)  # must not imitate our output
    return words if len(words) <= LONGEST_COMMAND else f"{words[:LONGEST_COMMAND]}..."


def main(name: str, seconds: str, rank: str, *numbers: str) -> None:
    """``rank``: pid of the rank, which may have exited already; ``numbers``: of what outlives it."""
    timeout, pids = float(seconds), [int(number) for number in numbers]
    while os.getppid() == int(rank):
        time.sleep(TICK_SECONDS)
    left = timeout
    while pids and left > 0:
        time.sleep(TICK_SECONDS)
        left -= TICK_SECONDS
        pids = [pid for pid in pids if set(_output_of(os.getpid())) & set(_output_of(pid))]
    if not pids:
        return
    commands = ", ".join(f"{pid} ({describe_command(pid)})" for pid in pids)
    message = (
        f"{name} has left processes that hold its output, for which the launcher waits: {commands}. They are ended, "
        f"{timeout:g} s after it. Redirect the output of such a process, or raise --exit_timeout."
    )
    with contextlib.suppress(OSError):
        os.write(2, f"ringtrain: warning: {message}\n".encode())
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _output_of(pid: int) -> Iterator[str]:
    """Pipes and terminals, as far as visible."""
    for descriptor in OUTPUT:
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if link.startswith(("pipe:", "/dev/pts/")):
                yield link
