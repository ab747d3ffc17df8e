"""Rank, size and node of this process, from the launcher's variables."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ringtrain.errors import UsageError

# Slurm's special steps (batch script, interactive shell, ...).
SLURM_FIRST_SPECIAL_STEP = 0xFFFFFFF0
GLOO_LAUNCHER = "horovodrun --gloo"


@dataclass(frozen=True, kw_only=True)
class World:
    rank: int  # 0 <= rank < size
    size: int
    local_rank: int  # 0 <= local_rank < local_size
    local_size: int  # processes on this node
    node: str  # host name
    launcher: str  # such as "srun" or "no launcher"

    def __post_init__(self) -> None:
        for name, value, bound in (("rank", self.rank, self.size), ("local_rank", self.local_rank, self.local_size)):
            if not 0 <= value < bound:
                raise UsageError(
                    f"{self.launcher} says {name} {value} of {bound}; a {name} must be from 0 to {bound - 1}. "
                    "Start the run again in a clean shell: variables of another launcher may be left in this one."
                )

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0


def read_world(environ: Mapping[str, str], *, node: str | None = None) -> World:
    """Read the launcher's variables.

    The innermost launcher wins: within a Slurm job, ``mpirun`` and ``horovodrun`` keep Slurm's variables.
    """
    names: tuple[str, ...]
    if environ.get("HOROVOD_CONTROLLER") == "gloo" and "HOROVOD_RANK" in environ:
        launcher, names = GLOO_LAUNCHER, ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    elif "OMPI_COMM_WORLD_RANK" in environ:
        names = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        launcher = "mpirun (Open MPI)"
    # srun --mpi=pmi2 sets PMI_RANK as well, but not MPI_LOCALRANKID.
    elif "PMI_RANK" in environ and ("MPI_LOCALRANKID" in environ or not _is_slurm_step(environ)):
        launcher = "mpiexec (MPICH or Intel MPI)"
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    elif _is_slurm_step(environ):
        launcher, names = "srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    else:
        launcher, names = "no launcher", ()
    numbers = [_read_integer(environ, name) for name in names] or [0, 1, 0, 1]
    if launcher == "srun":
        numbers.append(_read_slurm_tasks(environ))
    rank, size, local_rank, local_size = numbers
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=socket.gethostname() if node is None else node,
        launcher=launcher,
    )


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    """True if srun started this process; batch scripts have SLURM_PROCID too."""
    if "SLURM_STEP_ID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return False
    return _read_integer(environ, "SLURM_STEP_ID") < SLURM_FIRST_SPECIAL_STEP


def _read_text(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise UsageError(
            f"the launcher did not set {name}, though it set its other variables. Start the run again in a clean "
            "shell with horovodrun, mpirun or srun."
        )
    return environ[name]


def _read_integer(environ: Mapping[str, str], name: str) -> int:
    text = _read_text(environ, name)
    if not re.fullmatch(r"\d+", text):
        raise UsageError(f"{name}={text!r} must be a whole number. Unset it, or start the run again in a clean shell.")
    return int(text)


def _read_slurm_tasks(environ: Mapping[str, str]) -> int:
    """Parse this node's tasks from a list such as ``2(x3),1``."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = _read_text(environ, name)
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise UsageError(f"{name}={text!r} must look like 2(x3),1. Start the run again with srun.")
        counts += [int(match[1])] * int(match[2] or 1)
    node_index = _read_integer(environ, "SLURM_NODEID")
    if node_index >= len(counts):
        raise UsageError(f"{name}={text!r} names {len(counts)} nodes, but SLURM_NODEID={node_index}.")
    return counts[node_index]
