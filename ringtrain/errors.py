"""Every error that a user can cause, each with the exit code that the command line documents.

A message names the thing, its value, the rule and the remedy. Such an error leaves the program without a traceback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

# In the errors of native sums, which pass through TensorFlow and lose their type there.
LOST_RANK_SIGN = "a rank has ended that others wait for"
# In the errors of ringtrain.keras, in a script that has not called ringtrain.keras.init().
NO_HOROVOD_SIGN = "Horovod is not initialized"

# Statuses of ``end`` records in words, if they differ from what is recorded.
STATUS_WORDS = {
    "usage": "wrong usage",
    "data": "wrong data",
    "replicasdiffer": "replicas differ",
    "lostranks": "lost a rank",
    "outofmemory": "out of memory",
    "rundirectory": "run directory not writable",
    "leaselost": "taken over by another process",
}

Cause = Literal["signal", "file", "time"]
Reach = Literal["run", "node", "rank"]


class RingtrainError(Exception):
    """Base of all errors with a documented exit code.

    ``reach`` says who raises this same error, so that it is printed once: ``"run"`` where every rank does (all of them
    read the same arguments, or the same reduced numbers), ``"node"`` where all ranks of a node do (they look at the
    same files), ``"rank"`` where this one may be alone. ``is_agreed`` says of ``"run"`` that the ranks had met when it
    was raised, so that it is not just this one's, by other arguments than theirs. ``is_told``: it has been printed.
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
        """The status in the ``end`` record of a run that this error ends, such as ``diverged``."""
        return "failed" if cls is RingtrainError else cls.__name__.removesuffix("Error").lower()


class UsageError(RingtrainError):
    """The command line, the configuration, the launcher or the installation is wrong."""

    exit_code = 2
    reach = "run"


class DataError(RingtrainError):
    """The data are missing, damaged or not what the workload needs."""

    exit_code = 3


class DivergedError(RingtrainError):
    """The training produced a non-finite loss or gradient."""

    exit_code = 4
    reach = "run"


class ReplicasDifferError(RingtrainError):
    """Ranks, or runs that must agree, hold different weights, slots, losses or samples."""

    exit_code = 5
    reach = "run"


class HangError(RingtrainError):
    """Nothing moved for longer than ``--hang_timeout`` allows, or a rank was silent for so long."""

    exit_code = 6
    stacks: Sequence[Mapping[str, Any]] = ()  # of ranks, for the ``end`` record


class PreemptedError(RingtrainError):
    """The run was asked to stop before its end, and is saved.

    ``stopped_by`` says what told it: ``"signal"``, ``"file"`` (the user's wish, which nobody overrules by starting the
    run again) or ``"time"``.
    """

    exit_code = 75  # EX_TEMPFAIL: try again
    reach = "run"

    def __init__(self, message: str, *, reach: Reach | None = None, stopped_by: Cause = "signal") -> None:
        super().__init__(message, reach=reach)
        self.stopped_by = stopped_by


EXIT_CODES: dict[int, type[RingtrainError]] = {
    error.exit_code: error
    for error in (UsageError, DataError, DivergedError, ReplicasDifferError, HangError, PreemptedError)
}
