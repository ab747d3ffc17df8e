"""Time limits of a run: end of its batch job, and ``--max_hours``."""

from __future__ import annotations

import datetime
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ringtrain.runtime.processes import ask

# For the current step or batch, and the save; for short jobs a tenth of the time.
MARGIN_SECONDS = 120.0
MARGIN_SHARE = 0.1
LEAST_MARGIN_SECONDS = 10.0
QUERY_SECONDS = 10.0


class TimeLimit(NamedTuple):
    seconds_left: float  # from now
    reason: str  # for messages


def find_limits(max_hours: float | None, environ: Mapping[str, str]) -> list[TimeLimit]:
    limits = [TimeLimit(max_hours * 3600, f"--max_hours {max_hours:g}")] if max_hours is not None else []
    end = read_job_end(environ)
    if end is not None:
        limits.append(plan_job_limit(end, now=time.time(), job=environ["SLURM_JOB_ID"]))
    return limits


def plan_job_limit(end: float, *, now: float, job: str) -> TimeLimit:
    """``end``: seconds since 1970; the margin is for saving."""
    left = end - now
    margin = min(MARGIN_SECONDS, max(LEAST_MARGIN_SECONDS, MARGIN_SHARE * left))
    clock = datetime.datetime.fromtimestamp(end).strftime("%H:%M:%S")
    return TimeLimit(left - margin, f"the end of Slurm job {job} at {clock}")


def read_job_end(environ: Mapping[str, str], ask: Callable[[str], str] | None = None) -> float | None:
    """Return this Slurm job's end in seconds since 1970; ``squeue`` knows later changes than the environment."""
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return None
    try:
        return datetime.datetime.fromisoformat((ask or ask_squeue)(job).strip()).timestamp()
    except ValueError:  # squeue failed; or NONE, N/A, UNLIMITED
        text = environ.get("SLURM_JOB_END_TIME", "")
        return float(text) if text.isdecimal() and int(text) else None


def ask_squeue(job: str) -> str:
    """Return local time, such as ``2026-11-21T17:03:05``; empty on failure."""
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%e"]
    environ = {**os.environ, "SLURM_TIME_FORMAT": "standard"}  # overrides the user's format
    status, words = ask(command, seconds=QUERY_SECONDS, env=environ, stderr=subprocess.DEVNULL)
    return "" if status is None else words
