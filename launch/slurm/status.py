"""Runs and their jobs: state, step, loss, time left, last error."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ringtrain.errors import PreemptedError, UsageError
from ringtrain.messages.escaping import escape
from ringtrain.report.tables import format_seconds, format_value
from ringtrain.run.directory import CONFIG_FILE, METRICS_FILE, parse_event, read_lines
from ringtrain.run.lease import Holder, read_holder

from .controller import ask

REFRESH_SECONDS = 5.0
PIPE_COLUMNS, ERROR_COLUMNS = 160, 70
PLACES = ("", "*/", "*/*/")  # of runs, below the directory
KINDS = ("start", "train", "end")
COLUMNS = ("run", "state", "job", "step", "loss", "examples/s", "time left", "last error")


class Job(NamedTuple):
    number: str  # as in SLURM_JOB_ID
    shown: str  # such as 12_3
    state: str
    reason: str
    directory: str
    name: str

    def __str__(self) -> str:
        return f"{self.shown} {self.state.lower()}" + (f" ({self.reason})" if self.state == "PENDING" else "")


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    last: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # events of the last start, by kind
    error: str = ""  # of the last start that failed
    holder: Holder | None = None

    @property
    def state(self) -> str:
        if end := self.last.get("end"):
            return str(end.get("status"))
        if self.holder is None:
            return "not started"
        return "running" if self.holder.is_alive else "killed"

    def row(self, job: Job | None) -> list[str]:
        train, start = self.last.get("train", {}), self.last.get("start", {})
        step, total, seconds = train.get("step"), start.get("total_steps"), train.get("sec_per_step")
        left = ""
        if self.state == "running" and type(total) is type(step) is int and isinstance(seconds, int | float):
            left = format_seconds((total - step) * seconds)
        of = f" of {format_value(total)}" if total else ""
        values = [format_value(train.get(name)) for name in ("loss", "examples_per_sec")]
        return [self.name, self.state, str(job or ""), format_value(step) + of, *values, left, self.error]


def show(directory: Path) -> int:
    """Live on a terminal, until Ctrl-C. Raise UsageError without runs and jobs."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_COLUMNS)
        console.print(draw(directory))
        return 0
    try:
        with Live(draw(directory), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(REFRESH_SECONDS)
                live.update(draw(directory), refresh=True)
    except KeyboardInterrupt:
        return 0


def draw(directory: Path) -> Group:
    jobs, note = list_jobs()
    rows: list[list[str]] = []
    shown = set[Job | None]()
    for path in sorted(file.parent for place in PLACES for file in directory.glob(place + CONFIG_FILE)):
        run = read_run(path, str(path.relative_to(directory)) if path != directory else path.name)
        job = next((job for job in jobs if run.holder and job.number == run.holder.job), None)
        shown.add(job)
        rows.append(run.row(job))
    others = [job for job in jobs if job not in shown and Path(job.directory) == Path.cwd()]
    rows += [Run(name=job.name).row(job) for job in others]
    if not rows:
        raise UsageError(
            f"there is no run in {str(directory)!r}, and no job was submitted from this directory. Name the directory "
            "of the runs, such as the parent of --out."
        )
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(escape(cell)) for cell in row))
    return Group(table, Text(escape(note))) if note else Group(table)


def read_run(path: Path, name: str) -> Run:
    lines: dict[str, bytes] = {}
    failure: dict[str, Any] | None = None
    try:
        for line in read_lines(path / METRICS_FILE):
            kind = next((kind for kind in KINDS if line.startswith(f'{{"event": "{kind}"'.encode())), None)
            if kind == "start":
                lines.pop("end", None)
            if kind is not None:
                lines[kind] = line
            if kind == "end" and (end := parse_event(line)):
                failure = end if end.get("exit_code") not in (0, PreemptedError.exit_code) else None
        holder = read_holder(path)
    except OSError as error:
        return Run(name=name, error=f"it cannot be read: {error.strerror}")
    last = {kind: event for kind, line in lines.items() if (event := parse_event(line))}
    why = textwrap.shorten(str((failure or {}).get("message", "")), ERROR_COLUMNS)
    return Run(name=name, last=last, error=why, holder=holder)


def list_jobs() -> tuple[list[Job], str]:
    """Return the user's jobs, or why they are unknown."""
    answer = ask(["squeue", "--me", "--array", "--noheader", "--format=%A\t%i\t%T\t%r\t%Z\t%j"], os.environ)
    if not answer.is_good:
        return [], f"Jobs are unknown: {textwrap.shorten(answer.text, 100)}"
    fields = [line.split("\t", len(Job._fields) - 1) for line in answer.text.splitlines()]
    return [Job(*values) for values in fields if len(values) == len(Job._fields)], ""
