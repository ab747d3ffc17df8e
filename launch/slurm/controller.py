"""Requests to Slurm's controller: argument lists, in bounded time, repeated if it does not answer."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

ANSWER_SECONDS = 60.0  # Slurm's programs themselves give up after a few times MessageTimeout (10 s)
PAUSES_SECONDS = (2.0, 10.0, 30.0)  # a controller that starts again or hands over is away for a moment
AWAY = re.compile("Unable to contact")  # nothing has been done; after a timeout one would not know
# Variables of Slurm's own that its programs read, besides those named SBATCH_*.
KEPT_VARIABLES = {"SLURM_CONF", "SLURM_CLUSTERS"}


class Answer(NamedTuple):
    """The answer of a Slurm program."""

    is_good: bool
    text: str  # its output if it succeeded, else the reason, in one line


def describe_job(job: str) -> str | None:
    """The output of ``scontrol show job``; None if the controller did not answer."""
    answer = ask(["scontrol", "show", "job", job])
    return answer.text if answer.is_good else None


def requeue(job: str) -> str | None:
    """Put a running job back into the queue, which ends it; returns why that was refused, else None."""
    answer = ask(["scontrol", "requeue", job])
    return None if answer.is_good else answer.text


def submit(*options: str, text: str = "", environ: Mapping[str, str] | None = None) -> Answer:
    """Submit a script, ``text`` or a file among sbatch's options; the answer is its number, or why it was refused."""
    answer = ask(["sbatch", "--parsable", *options], environ, text)
    return answer._replace(text=read_job_number(answer.text)) if answer.is_good else answer


def read_job_number(text: str) -> str:
    """The number in what ``sbatch --parsable`` prints: ``NUMBER`` or ``NUMBER;CLUSTER``, after any notices."""
    return text.split("\n")[-1].partition(";")[0]


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables of the job that set it, which would mislead the next one."""
    return {name: value for name, value in environ.items() if not name.startswith("SLURM_") or name in KEPT_VARIABLES}


def ask(command: Sequence[str], environ: Mapping[str, str] | None = None, text: str = "") -> Answer:
    """Run one of Slurm's programs; again, after a pause, if the controller was away."""
    for pause in (*PAUSES_SECONDS, None):
        answer = ask_once(command, environ, text)
        if pause is None or answer.is_good or not AWAY.search(answer.text):
            break
        time.sleep(pause)
    return answer


def ask_once(command: Sequence[str], environ: Mapping[str, str] | None, text: str) -> Answer:
    """Run one of Slurm's programs once."""
    try:
        finished = subprocess.run(
            command,
            env=environ,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Answer(False, f"{command[0]} did not answer in {ANSWER_SECONDS:.0f} s")
    except FileNotFoundError:
        return Answer(False, f"{command[0]} is not on PATH")
    except OSError as error:
        return Answer(False, f"{command[0]} cannot be started: {error.strerror}")
    if finished.returncode == 0:
        return Answer(True, finished.stdout.strip())
    return Answer(False, " ".join((finished.stderr or finished.stdout).split()) or f"exit code {finished.returncode}")
