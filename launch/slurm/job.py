"""Job request and its checks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any

from ringtrain.errors import UsageError
from ringtrain.messages.rules import at_least
from ringtrain.runtime.srun import HOROVODRUN

from ..arguments import is_script, plan_program

MPI_NAME = re.compile(r"pmix(_v\d+)?|pmi2|" + HOROVODRUN)
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MEMORY = re.compile(r"\d+[KMGT]?", re.ASCII)  # 0: all memory of a node
# sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes[:seconds]
TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}", re.ASCII)
MAX_NAME_BYTES = 200  # part of a file name, at most 255 bytes
MAX_SIGNAL_SECONDS = 65535
MAX_NUMBER = 200_000  # beyond any cluster


def option(default: Any, text: str, metavar: str | None = None) -> Any:
    """A field that is also an option of the command line; ``text``: its help."""
    return field(default=default, metadata={"metavar": metavar, "help": text})


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A ringtrain run as a Slurm job. Checks raise ``UsageError``."""

    nodes: int = option(MISSING, "nodes of the job", "N")
    spare_nodes: int = option(0, "more nodes, each to replace a lost one (default: 0)", "N")
    gpus_per_node: int = option(0, "GPUs of each node, one for each rank", "N")
    ranks_per_node: int | None = option(None, "ranks on each node (default: as many as GPUs)", "N")
    cpus_per_rank: int = option(1, "cores of each rank, to compute or to feed its GPU (default: 1)", "N")
    time: str | None = option(
        None, "time limit, such as 30 (minutes), 12:00:00 or 2-00:00:00 (default: the partition's)"
    )
    partition: str | None = option(None, "as sbatch's")
    account: str | None = option(None, "as sbatch's")
    qos: str | None = option(None, "as sbatch's")
    constraint: str | None = option(None, "as sbatch's")
    mem: str | None = option(None, "memory of each node, such as 64G (default: the partition's)")
    job_name: str = option("ringtrain", "(default: ringtrain)")
    output: str = option(  # % escaped for argparse
        "%x-%j.out",
        "file of all that the job prints (default: %%x-%%j.out, its name and number; %%x-%%A_%%a.out of an array)",
    )
    array_limit: int | None = option(None, "runs of the array at a time (default: as many as fit)", "N")
    signal_seconds: int = option(120, "seconds before the time limit to save and stop (default: 120)", "N")
    max_restarts: int = option(3, "restarts after a failure without a newer checkpoint (default: 3)", "N")
    max_requeues: int = option(20, "how often the job may be started again at all (default: 20)", "N")
    conda: str | None = option(None, "conda environment to activate", "ENV")
    venv: str | None = option(None, "virtual environment to activate", "PATH")
    python: str = option("python", "the interpreter (default: python, of the environment)")
    mpi: str = "pmix"
    can_requeue: bool = True  # by ringtrain or by Slurm
    modules: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()  # or a script and its arguments
    members: tuple[tuple[str, ...], ...] = ()  # further flags of each member of a job array

    def __post_init__(self) -> None:
        self._check_shape()
        self._check_spare_nodes()
        self._check_words()
        self._check_time()
        self._check_environment()
        starts_again = (self.can_requeue or self.spare_nodes) and not is_script(self.flags)
        if starts_again and any(read_flag([*self.flags, *more], "resume") == "never" for more in self.members or [()]):
            raise UsageError(
                "resume is 'never', with which each start of a requeued job would train a new run from the beginning. "
                "Leave --resume out (the run resumes from its directory), or give --no_requeue and no --spare_nodes."
            )

    @property
    def num_ranks_per_node(self) -> int:
        return self.ranks_per_node or self.gpus_per_node

    @property
    def program(self) -> list[str]:
        return plan_program(self.flags)

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.num_ranks_per_node

    def _check_shape(self) -> None:
        for name, value, least in (
            ("nodes", self.nodes, 1),
            ("spare_nodes", self.spare_nodes, 0),
            ("gpus_per_node", self.gpus_per_node, 0),
            ("ranks_per_node", self.num_ranks_per_node, 0),
            ("cpus_per_rank", self.cpus_per_rank, 1),
            ("max_restarts", self.max_restarts, 0),
            ("max_requeues", self.max_requeues, 0),
            ("array_limit", 1 if self.array_limit is None else self.array_limit, 1),
        ):
            at_least(name, value, least, MAX_NUMBER)
        at_least("signal_seconds", self.signal_seconds, 1)
        if self.signal_seconds > MAX_SIGNAL_SECONDS:
            raise UsageError(f"signal_seconds is {self.signal_seconds}; Slurm takes at most {MAX_SIGNAL_SECONDS}.")
        if not self.num_ranks_per_node:
            raise UsageError(
                "neither gpus_per_node nor ranks_per_node says how many ranks each node has. Give --gpus_per_node G "
                "(one rank for each GPU), or --ranks_per_node R to compute on the cores."
            )
        if self.gpus_per_node and self.num_ranks_per_node != self.gpus_per_node:
            raise UsageError(
                f"ranks_per_node is {self.num_ranks_per_node} and gpus_per_node is {self.gpus_per_node}; each rank "
                "takes one GPU, so the two must be equal. Give --gpus_per_node alone."
            )

    def _check_spare_nodes(self) -> None:
        for name, value, is_wrong, remedy in (
            ("nodes", self.nodes, self.nodes == 1, "Give --nodes 2 or more"),
            ("mpi", self.mpi, self.mpi == HOROVODRUN, "Give --mpi pmix or pmi2"),
            ("max_restarts", self.max_restarts, not self.max_restarts, "Give --max_restarts 1 or more"),
        ):
            if self.spare_nodes and is_wrong:
                raise UsageError(
                    f"spare_nodes is {self.spare_nodes} and {name} is {value!r}, with which no lost node is replaced. "
                    f"{remedy}, or leave --spare_nodes out."
                )

    def _check_words(self) -> None:
        """sbatch parses these lines: one word each, printable."""
        for name in ("partition", "account", "qos", "constraint"):
            value = getattr(self, name)
            if value is not None and not (value.isprintable() and re.fullmatch(r"[^-\s]\S*", value)):
                raise UsageError(f"{name} is {value!r}; it must be one word of printable characters.")
        for name, value, refused in (("job_name", self.job_name, "/\\"), ("output", self.output, "\\")):
            if not value.strip() or not value.isprintable() or any(character in value for character in refused):
                raise UsageError(
                    f"{name} is {value!r}; it must be printable characters, none of them a line break or one of "
                    f"{' '.join(refused)} , as Slurm makes a file name of it. Choose another."
                )
        num_bytes = len(self.job_name.encode())
        if num_bytes > MAX_NAME_BYTES:
            raise UsageError(f"job_name has {num_bytes} bytes; it must have at most {MAX_NAME_BYTES}.")
        if self.mem is not None and not MEMORY.fullmatch(self.mem):
            raise UsageError(f"mem is {self.mem!r}; it must be a number with K, M, G or T, such as 64G.")
        if not MPI_NAME.fullmatch(self.mpi):
            raise UsageError(f"mpi is {self.mpi!r}; it must be auto, pmix, pmi2 or {HOROVODRUN}.")

    def _check_time(self) -> None:
        if self.time is None:
            return
        seconds = read_time(self.time)
        if seconds is None:
            raise UsageError(
                f"time is {self.time!r}; it must be minutes, hours:minutes:seconds or days-hours:minutes:seconds, such "
                "as 30, 12:00:00 or 2-00:00:00."
            )
        if seconds <= self.signal_seconds:
            raise UsageError(
                f"time is {self.time!r}, {seconds} seconds, and signal_seconds is {self.signal_seconds}: the ranks "
                "would be asked to stop as soon as they start. Ask for more time, or give fewer --signal_seconds."
            )

    def _check_environment(self) -> None:
        if self.conda is not None and self.venv is not None:
            raise UsageError(f"conda is {self.conda!r} and venv is {self.venv!r}; give one of the two.")
        named = [("conda", self.conda), ("venv", self.venv), ("python", self.python)]
        for name, value in named + [("module", module) for module in self.modules]:
            if value is not None and (not value or value.startswith("-")):
                raise UsageError(f"{name} is {value!r}; it must not be empty, nor begin with a minus sign.")
        for name, _ in self.env:
            if not VARIABLE_NAME.fullmatch(name):
                raise UsageError(
                    f"env sets {name!r}, which is no name of a variable: letters, digits and _, no digit first. Write "
                    "--env NAME=VALUE."
                )


def read_time(text: str) -> int | None:
    """Return seconds; None if invalid."""
    if not TIME.fullmatch(text):
        return None
    days, _, clock = text.rpartition("-")
    numbers = [int(number) for number in clock.split(":")]
    units = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def read_flag(flags: Sequence[str], name: str) -> str | None:
    value = None
    for index, flag in enumerate(flags):
        if flag == f"--{name}" and index + 1 < len(flags):
            value = flags[index + 1]
        elif flag.startswith(f"--{name}="):
            value = flag.partition("=")[2]
    return value
