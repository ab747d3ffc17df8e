"""Errors with a documented exit code, printed without a traceback.

A message names the object, its value, the rule and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

# In errors of native sums, which lose their type in TensorFlow.
LOST_RANK_SIGN = "a rank has ended that others wait for"
# In errors of ringtrain.keras before ringtrain.keras.init().
NO_HOROVOD_SIGN = "Horovod is not initialized"

# Readable statuses of ``end`` records, if different.
STATUS_WORDS = {
    "usage": "wrong usage",
    "data": "wrong data",
    "replicasdiffer": "replicas differ",
    "lostranks": "lost a rank",
    "outofmemory": "out of memory",
    "rundirectory": "run directory not writable",
    "leaselost": "taken over by another process",
    "senderbusy": "another process sends",
}

Cause = Literal["signal", "file", "time"]
Reach = Literal["run", "node", "rank"]


class RingtrainError(Exception):
    """Base of all errors with a documented exit code.

    ``reach`` names the ranks that raise the same error, so that it is printed once: ``"run"``: every rank (same
    arguments or reduced values); ``"node"``: all ranks of a node (same files); ``"rank"``: perhaps this rank only.
    ``is_agreed``: the ranks communicated before, so that a ``"run"`` error is not this rank's alone. ``is_told``:
    already printed.
    """

    exit_code = 1
    reach: Reach = "rank"
    is_agreed = False
    is_told = False

    def __init__(self, message: str, *, reach: Reach | None = None) -> None:
        super().__init__(message)
        self.reach = reach or self.reach

    @classmethod
    def status(cls) -> str:
        """Status in the ``end`` record of a run, such as ``diverged``."""
        return "failed" if cls is RingtrainError else cls.__name__.removesuffix("Error").lower()


class UsageError(RingtrainError):
    """Wrong command line, configuration, launcher or installation."""

    exit_code = 2
    reach = "run"


class DataError(RingtrainError):
    """Data are missing, damaged or not what the workload needs."""

    exit_code = 3


class DivergedError(RingtrainError):
    """Non-finite loss or gradient in training."""

    exit_code = 4
    reach = "run"


class ReplicasDifferError(RingtrainError):
    """Ranks, or runs that must agree, have different weights, slots, losses or samples."""

    exit_code = 5
    reach = "run"


class HangError(RingtrainError):
    """No progress, or a silent rank, for longer than ``--hang_timeout``."""

    exit_code = 6
    stacks: Sequence[Mapping[str, Any]] = ()  # of ranks, for the ``end`` record


class PreemptedError(RingtrainError):
    """The run was asked to stop early, and is saved.

    ``stopped_by``: ``"signal"``, ``"time"`` or ``"file"`` (by the user: no automatic restart).
    """

    exit_code = 75  # EX_TEMPFAIL
    reach = "run"

    def __init__(self, message: str, *, reach: Reach | None = None, stopped_by: Cause = "signal") -> None:
        super().__init__(message, reach=reach)
        self.stopped_by = stopped_by


EXIT_CODES: dict[int, type[RingtrainError]] = {
    error.exit_code: error
    for error in (UsageError, DataError, DivergedError, ReplicasDifferError, HangError, PreemptedError)
}
