"""Requests to Slurm's controller, with time limits and retries."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

ANSWER_SECONDS = 60.0  # Slurm's programs give up earlier
PAUSES_SECONDS = (2.0, 10.0, 30.0)  # controllers restart and fail over
AWAY = re.compile("Unable to contact")  # nothing was executed; after a timeout that is unknown


class Answer(NamedTuple):
    is_good: bool
    text: str  # output or reason


def find_max_array_size() -> int | None:
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask(["scontrol", "show", "config"]).text, re.MULTILINE)
    return int(found[1]) if found else None


def submit(*options: str, text: str = "", environ: Mapping[str, str] | None = None) -> Answer:
    """Submit ``text`` or a file; return the job number, or the reason if refused."""
    answer = ask(["sbatch", "--parsable", *options], environ, text)
    # NUMBER or NUMBER;CLUSTER, after any notices
    return answer._replace(text=answer.text.split("\n")[-1].partition(";")[0]) if answer.is_good else answer


def ask(command: Sequence[str], environ: Mapping[str, str] | None = None, text: str = "") -> Answer:
    for pause in (*PAUSES_SECONDS, None):
        answer = ask_once(command, environ, text)
        if pause is None or answer.is_good or not AWAY.search(answer.text):
            break
        time.sleep(pause)
    return answer


def ask_once(command: Sequence[str], environ: Mapping[str, str] | None, text: str) -> Answer:
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
