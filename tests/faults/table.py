"""The matrix of faults as data: what happens to which rank at which moment under which launcher, and what follows."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from dataclasses import dataclass

NUM_RANKS = 3
MOMENTS = ("setup", "compile", "data", "step", "all-reduce", "evaluation", "save", "end")
WRITTEN = ("save", "end")  # by rank 0 alone
AT_BOTH = ("all-reduce", *WRITTEN)  # moments in which the other ranks may wait for rank 0
LAUNCHERS = ("launch", "launch over Gloo", "mpirun", "horovodrun")
# What `make test` runs of it; `make test-faults` runs all. Other tests hold more of it (runs, stops, resumed runs).
BY_DEFAULT = {
    "SIGKILL to rank 1 in all-reduce under launch",
    "sleep at rank 1 in data under mpirun",
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens, and what the users sees of it.

    Attributes:
        signal: what is sent from outside; None for what the hook of ``tests.faults.faulty`` does.
        act: what the hook does.
        exit_code: that of ``launch``; launchers blur it.
        status: of the ``end`` record; None where the fault leaves nobody to write one, or may.
        named: what must be read, as a regular expression; ``{rank}`` and ``{node}`` are the rank and its host.
        resumes: whether the same command then goes on and trains every sample once.
    """

    signal: signal.Signals | None = None
    act: str = "pause"
    exit_code: int
    status: str | None
    named: str
    resumes: bool = True


KILLED = r"launch: rank {rank} on {node} \(pid \d+\) was killed by %s, the first to end"
STOPPED = r"error: .*(rank {rank} on {node} has been silent for \d+ s|nothing was heard of rank {rank} on {node}\.)"
FAILED = r"(?s)Traceback.*error: rank {rank} on {node} failed: .*ZeroDivisionError: the fault of rank {rank}"
FAULTS = {
    "SIGKILL": Fault(signal=signal.SIGKILL, exit_code=1, status=None, named=KILLED % "SIGKILL"),
    "SIGSEGV": Fault(signal=signal.SIGSEGV, exit_code=1, status=None, named=KILLED % "SIGSEGV"),
    "SIGABRT": Fault(signal=signal.SIGABRT, exit_code=1, status=None, named=KILLED % "SIGABRT"),
    "SIGSTOP": Fault(signal=signal.SIGSTOP, exit_code=6, status="hang", named=STOPPED),
    "SIGUSR1": Fault(
        signal=signal.SIGUSR1, exit_code=75, status="preempted", named="stopped by SIGUSR1 at rank {rank} on {node}"
    ),
    "SIGTERM": Fault(
        signal=signal.SIGTERM, exit_code=75, status="preempted", named="stopped by SIGTERM at rank {rank} on {node}"
    ),
    "SIGINT": Fault(
        signal=signal.SIGINT, exit_code=75, status="preempted", named="stopped by SIGINT at rank {rank} on {node}"
    ),
    "raise": Fault(act="raise", exit_code=1, status=None, named=FAILED),
    "exit": Fault(
        act="exit",
        exit_code=1,
        status=None,
        named=r"launch: rank {rank} on {node} \(pid \d+\) ended with exit code 7, the first to end",
    ),
    "quit": Fault(
        act="quit",
        exit_code=1,
        status=None,
        named=r"launch: rank {rank} on {node} \(pid \d+\) ended with exit code 0 in mid-run, such as by sys\.exit",
    ),
    "sleep": Fault(act="sleep", exit_code=6, status="hang", named="rank {rank} on {node} waits for data of"),
    "lock": Fault(act="lock", exit_code=6, status="hang", named=STOPPED),
    "nan": Fault(
        act="nan", exit_code=4, status="diverged", named="rank {rank} on {node}", resumes=False
    ),
    "flip": Fault(act="flip", exit_code=5, status="replicasdiffer", named="rank {rank} on {node}", resumes=False),
    "allocate": Fault(
        act="allocate", exit_code=1, status=None, named="error: rank {rank} on {node}: out of memory on the host"
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault, once."""

    fault: str
    rank: int
    moment: str
    launcher: str

    @property
    def name(self) -> str:
        to = "to" if FAULTS[self.fault].signal else "at"
        return f"{self.fault} {to} rank {self.rank} in {self.moment} under {self.launcher}"

    @property
    def what(self) -> Fault:
        return FAULTS[self.fault]


def cases() -> Iterator[Case]:
    """The whole matrix, at rank 0, which writes, and at another in turn; kills and stops at both where it matters.

    The other is in turn the one in the middle and the last.
    """
    others = itertools.cycle((1, NUM_RANKS - 1))
    ranks = itertools.cycle((NUM_RANKS - 1, 0, 1, 0))
    for fault, moments, launchers in (
        ("SIGKILL", MOMENTS, ("launch",)),
        ("SIGKILL", ("step", "save"), ("mpirun", "launch over Gloo")),
        ("SIGKILL", ("step",), ("horovodrun",)),
        ("SIGSEGV", ("step",), ("launch",)),
        ("SIGABRT", ("all-reduce",), ("launch",)),
        ("SIGSTOP", MOMENTS, ("launch",)),
        ("SIGSTOP", ("all-reduce",), ("mpirun", "launch over Gloo")),
        ("SIGUSR1", ("setup", "compile", "data", "evaluation", "save"), ("launch",)),
        ("SIGTERM", ("step",), ("launch",)),
        ("SIGINT", ("step",), ("launch",)),
        ("raise", ("setup", "compile", "data", "step", "evaluation"), ("launch",)),
        ("raise", ("step",), ("launch over Gloo",)),
        ("exit", ("setup", "data", "evaluation"), ("launch",)),
        ("quit", ("setup", "data", "evaluation", "end"), ("launch",)),
        ("quit", ("data",), ("launch over Gloo", "mpirun")),
        ("sleep", ("data", "evaluation"), ("launch",)),
        ("sleep", ("data",), ("mpirun",)),
        ("lock", ("data",), ("launch",)),
        ("nan", ("step",), ("launch",)),
        ("flip", ("step",), ("launch",)),
        ("allocate", ("data", "compile"), ("launch",)),
    ):
        for moment, launcher in itertools.product(moments, launchers):
            if moment in WRITTEN and FAULTS[fault].signal is None:
                at: tuple[int, ...] = (0,)  # which alone comes there
            elif fault in ("SIGKILL", "SIGSTOP") and moment in AT_BOTH and launcher == "launch":
                at = (0, next(others))
            else:
                at = (next(ranks),)
            for rank in at:
                yield Case(fault=fault, rank=rank, moment=moment, launcher=launcher)
