"""The run directory: where one run keeps everything. Rank 0 alone writes into it."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ringtrain.errors import RingtrainError, UsageError

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
REPORT_FILE = "report.html"
# Of steps that are trained again after a checkpoint; a run's starts and ends stay.
STEP_EVENTS = ("train", "eval", "checkpoint", "warning")


class RunDirectoryError(RingtrainError):
    """The run directory cannot be written any more."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"the run directory {str(path)!r} cannot be written: {reason}. Make room, or bring the directory back, and "
            "start the same command again: it goes on from the newest checkpoint."
        )


class RunDirectory:
    """An open run directory: configuration and events of one run. Any thread may write events."""

    def __init__(
        self,
        path: Path,
        *,
        may_write: Callable[[], None] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """``may_write`` raises where another process has taken over; ``on_close`` lets go of the directory."""
        self.path, self.may_write = path, may_write
        self._on_close = on_close
        self._lock = threading.Lock()
        self._is_cut_off = False
        with self._explaining():
            self._metrics = _open_metrics(path)

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints (see ``ringtrain.checkpoint``)."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """The directory of TensorBoard's event files."""
        return self.path / "tensorboard"

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Keep the configuration; ``--config`` reads it back.

        Raises:
            RunDirectoryError: it cannot be written.
        """
        self.may_write()
        with self._explaining():
            temporary = self.path / f".{CONFIG_FILE}"
            temporary.write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
            temporary.replace(self.path / CONFIG_FILE)

    def write_event(self, event: str, **values: Any) -> None:
        """Append one line to metrics.jsonl, with the time (seconds since 1970).

        JSON has no infinities or NaN: such numbers are written as strings.

        Raises:
            RunDirectoryError: it cannot be written, such as on a full disk.
        """
        line = _line_of(event, values).encode()
        with self._lock:
            self.may_write()
            self._append(line)

    def _append(self, line: bytes) -> None:
        """Write a line; what a full disk leaves of one is a line of its own, which readers pass over."""
        data = (b"\n" if self._is_cut_off else b"") + line
        with self._explaining():
            while data:
                data = data[self._metrics.write(data) :]
                self._is_cut_off = bool(data)

    def forget_after(self, step: int) -> None:
        """Remove from metrics.jsonl what is going to be trained again, and a line that was cut off."""
        with self._lock, self._explaining():
            self.may_write()
            self._metrics.close()
            path = self.path / METRICS_FILE
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if _is_kept(line, step)]
            temporary = self.path / f".{METRICS_FILE}"
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            temporary.replace(path)
            self._metrics = _open_metrics(self.path)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Say of what cannot be written where it is, and what helps."""
        try:
            yield
        except OSError as error:
            raise RunDirectoryError(self.path, error.strerror or str(error)) from error

    def close(self) -> None:
        """Write no more, and let go of the directory."""
        self._metrics.close()
        self._on_close()


def _open_metrics(path: Path) -> io.FileIO:
    """Unbuffered, so that what could not be written once is not written later in the middle of something else."""
    return io.FileIO(path / METRICS_FILE, "a")


def append_event(path: Path, event: str, **values: Any) -> None:
    """Append one line to metrics.jsonl of a run whose writer is gone, perhaps in the middle of a line.

    Raises:
        OSError: it cannot be written.
    """
    with (path / METRICS_FILE).open("rb+") as metrics:
        size = metrics.seek(0, os.SEEK_END)
        metrics.seek(max(0, size - 1))
        cut_off = metrics.read() not in (b"", b"\n")
        metrics.write((("\n" if cut_off else "") + _line_of(event, values)).encode())


def create_run_directory(wanted: Path, *, is_anew: bool = False) -> Path:
    """Make the directory of a run where there is none, and return its path.

    Args:
        wanted: where the run is to be.
        is_anew: never take one that holds something: append a number until the name is free.

    Raises:
        UsageError: the directory holds something that is no run, or cannot be made.
    """
    candidates = [wanted, *(wanted.with_name(f"{wanted.name}-{number}") for number in range(2, 10_000))]
    for candidate in candidates:
        try:
            candidate.mkdir(parents=True)  # fails where it exists, so that two runs that start together never share one
            return candidate
        except FileExistsError:
            if not is_anew:
                break
        except OSError as error:
            raise UsageError(
                f"the run directory {str(wanted)!r} cannot be made: {error.strerror}. Give another with --out."
            ) from error
    if not wanted.is_dir() or (_holds_something(wanted) and not (wanted / CONFIG_FILE).is_file()):
        raise UsageError(
            f"out is {str(wanted)!r}, which is not empty and holds no run of ringtrain. Give another with --out, or "
            "remove it."
        )
    return wanted


def refuse_taken(output: Path) -> None:
    """See that nothing will be overwritten.

    Raises:
        UsageError: something is there.
    """
    if output.exists() or output.is_symlink():
        raise UsageError(
            f"{str(output)!r} is there already, and is left as it is. Give another with --output, or remove it.",
            reach="run",
        )


def read_config(path: Path) -> dict[str, Any] | None:
    """The configuration that a run directory keeps; None where it holds none.

    Raises:
        UsageError: the file is damaged.
    """
    try:
        values = yaml.safe_load((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (yaml.YAMLError, UnicodeDecodeError):
        values = None
    if not isinstance(values, dict) or not isinstance(values.get("optimizer"), dict):
        raise UsageError(
            f"{str(path / CONFIG_FILE)!r} is damaged: it holds no settings of a run. Restore it, or start anew beside "
            "this run with --resume never."
        )
    return values


def _holds_something(path: Path) -> bool:
    """Whether a directory holds more than the lease of a run that has not begun to write."""
    return any(not entry.name.startswith(".") and entry.name != METRICS_FILE for entry in path.iterdir()) or (
        (path / METRICS_FILE).exists() and (path / METRICS_FILE).stat().st_size > 0
    )


def _is_kept(line: str, step: int) -> bool:
    try:
        event = json.loads(line)
    except ValueError:
        return False
    if not isinstance(event, dict):
        return False
    return event.get("event") not in STEP_EVENTS or event.get("step", 0) <= step


def _line_of(event: str, values: Mapping[str, Any]) -> str:
    plain = {key: _json_value(value) for key, value in values.items()}
    return json.dumps({"event": event, **plain, "time": round(time.time(), 3)}) + "\n"


def _json_value(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
