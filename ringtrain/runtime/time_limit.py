"""The time at which a run must stop: the end of its batch job, or the hours that the user gives it."""

from __future__ import annotations

import datetime
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ringtrain.runtime.processes import ask

# Time for the step under way, an evaluation's batch and the save. A short job gives up a tenth of its time at most.
MARGIN_SECONDS = 120.0
MARGIN_SHARE = 0.1
LEAST_MARGIN_SECONDS = 10.0
QUERY_SECONDS = 10.0


class TimeLimit(NamedTuple):
    """A time to stop, and its reason."""

    seconds_left: float  # from now on
    reason: str  # what sets the limit, for the message


def find_limits(max_hours: float | None, environ: Mapping[str, str]) -> list[TimeLimit]:
    """The limits of this start's time, on rank 0; ``max_hours`` is what the user gives one start of the run."""
    limits = [TimeLimit(max_hours * 3600, f"--max_hours {max_hours:g}")] if max_hours is not None else []
    end = read_job_end(environ)
    if end is not None:
        limits.append(plan_job_limit(end, now=time.time(), job=environ["SLURM_JOB_ID"]))
    return limits


def plan_job_limit(end: float, *, now: float, job: str) -> TimeLimit:
    """Stop early enough before a job's end (seconds since 1970) to save."""
    left = end - now
    margin = min(MARGIN_SECONDS, max(LEAST_MARGIN_SECONDS, MARGIN_SHARE * left))
    clock = datetime.datetime.fromtimestamp(end).strftime("%H:%M:%S")
    return TimeLimit(left - margin, f"the end of Slurm job {job} at {clock}")


def read_job_end(environ: Mapping[str, str], ask: Callable[[str], str] | None = None) -> float | None:
    """The end of this Slurm job, in seconds since 1970; None outside a job, and if the job has no limit.

    ``squeue`` knows of a limit that was changed after the job's start; the job's variables are what is left where
    ``squeue`` cannot be asked.
    """
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return None
    try:
        return datetime.datetime.fromisoformat((ask or ask_squeue)(job).strip()).timestamp()
    except ValueError:  # no squeue; or NONE, N/A, UNLIMITED
        text = environ.get("SLURM_JOB_END_TIME", "")
        return float(text) if text.isdecimal() and int(text) else None


def ask_squeue(job: str) -> str:
    """The end of a job in local time, such as ``2026-11-21T17:03:05``; empty if ``squeue`` cannot be asked."""
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%e"]
    environ = {**os.environ, "SLURM_TIME_FORMAT": "standard"}  # else as the user likes to read it
    status, words = ask(command, seconds=QUERY_SECONDS, env=environ, stderr=subprocess.DEVNULL)
    return "" if status is None else words
