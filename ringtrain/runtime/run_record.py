"""Messages of a run to its launcher: run directory and end.

Launchers hide exit codes. ``launch local`` and batch scripts name a directory in the environment; the run writes two
files there, atomically. The first end record wins: later ones are consequences.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain.files.bounded import parse_json, read_bounded

DIRECTORY_VARIABLE = "RINGTRAIN_LAUNCH_DIR"
SUPERVISOR_VARIABLE = "RINGTRAIN_LAUNCH_PID"  # process id of ``launch local``
LEFT_VARIABLE = "RINGTRAIN_LAUNCH_LEFT"  # a file that a rank creates when it has finished
RUN_FILE, END_FILE, SIGNAL_FILE = "run.json", "end.json", "signal"
MAX_BYTES = 2**20
NO_WORD = (OSError, ValueError, KeyError, TypeError)  # missing or invalid file


class StartRecord(NamedTuple):
    """Run directory opened by rank 0."""

    path: Path  # absolute
    step: int  # of the checkpoint it resumes from, or 0
    is_complete: bool


class EndRecord(NamedTuple):
    status: str  # ``completed``, ``preempted``, or the failure, such as ``data``
    exit_code: int
    message: str | None = None
    stopped_by: str | None = None  # if preempted: ``signal``, ``file`` or ``time``


def record_start(path: Path, *, step: int, is_complete: bool) -> None:
    """Report the open run directory, on rank 0; forget the end of an earlier run of this process."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        with contextlib.suppress(OSError):
            Path(named, END_FILE).unlink(missing_ok=True)
    values = {"path": str(path.absolute()), "step": step, "is_complete": is_complete}
    _tell(RUN_FILE, values, replaces=True)


def record_end(values: Mapping[str, Any]) -> None:
    """Any rank's first report wins."""
    _tell(END_FILE, values, replaces=False)


def note_signal(directory: Path) -> None:
    """``launch local`` reports and passes on a signal."""
    (directory / SIGNAL_FILE).touch()


def is_signal_passed_on() -> bool:
    named = os.environ.get(DIRECTORY_VARIABLE)
    return named is not None and Path(named, SIGNAL_FILE).exists()


def find_supervisor() -> int | None:
    """Return the pid of ``launch local``, if it started this rank."""
    pid = os.environ.get(SUPERVISOR_VARIABLE, "")
    return int(pid) if pid.isdigit() else None


def record_exit() -> None:
    """Not written if user code exits with 0 earlier."""
    named = os.environ.get(LEFT_VARIABLE)
    if named:
        with contextlib.suppress(OSError):
            Path(named).touch()


def read_run(directory: Path) -> StartRecord | None:
    with contextlib.suppress(*NO_WORD):
        values = parse_json(read_bounded(directory / RUN_FILE, MAX_BYTES))
        return StartRecord(path=Path(values["path"]), step=int(values["step"]), is_complete=bool(values["is_complete"]))
    return None


def read_end(directory: Path) -> EndRecord | None:
    with contextlib.suppress(*NO_WORD):
        values = parse_json(read_bounded(directory / END_FILE, MAX_BYTES))
        status, exit_code = str(values["status"]), int(values["exit_code"])
        return EndRecord(status, exit_code, values.get("message"), values.get("stopped_by"))
    return None


def clear(directory: Path) -> None:
    for name in (RUN_FILE, END_FILE, SIGNAL_FILE):
        (directory / name).unlink(missing_ok=True)


def _tell(name: str, values: Mapping[str, Any], *, replaces: bool) -> None:
    named = os.environ.get(DIRECTORY_VARIABLE)
    if not named:
        return
    file = Path(named) / name
    temporary = file.with_name(f".{name}-{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):  # the listener has gone: not an error
        with temporary.open("x", encoding="utf-8") as written:
            json.dump(dict(values), written)
        if replaces:
            temporary.replace(file)
            return
        try:
            os.link(temporary, file)  # fails if it exists
        finally:
            temporary.unlink()
