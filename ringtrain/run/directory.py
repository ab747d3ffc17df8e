"""The run directory: where one run keeps everything. Rank 0 alone writes into it."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import math
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ringtrain.errors import RingtrainError, UsageError
from ringtrain.files.atomic import replace_text, replacing, require_regular
from ringtrain.files.bounded import (
    open_descriptor,
    open_directory,
    open_regular,
    parse_json,
    read_bounded,
    require_at_most,
    require_plain,
)
from ringtrain.run.identity import IDENTITY_FILE, read_identity

METRICS_FILE = "metrics.jsonl"
FIT_OF = "fit of "  # how the name of a run begins that callbacks.Run has kept; a script's name follows
# The settings of such a run; the others are those of a training by ringtrain itself.
FIT_SETTINGS = (
    "workload", "options", "out", "epochs", "log_every", "best_metric", "best_direction", "checkpoint_every", "keep",
    "resume", "hang_timeout", "max_hours",
)  # fmt: skip
CONFIG_FILE = "config.yaml"
REPORT_FILE = "report.html"
MAX_CONFIG_BYTES = 64 * 2**10  # a run's has about two
MAX_SETTINGS = 10_000
MAX_LINE_BYTES = 2**20  # of metrics.jsonl
MAX_METRICS_BYTES = 4 * 2**30  # some ten million events
MAX_STEP = 2**53  # the numbers that JSON's readers agree on
MAX_TIME = 2.5e11  # seconds since 1970, in the year 9892: what calendars can show
# Events whose step says where they belong; the others follow the events before them.
NEED_A_STEP = ("train", "eval", "checkpoint")
# Of steps that are trained again after a checkpoint; a run's starts and ends stay.
STEP_EVENTS = ("train", "eval", "checkpoint", "warning")


class RunDirectoryError(RingtrainError):
    """The run directory cannot be written any more."""

    def __init__(self, path: Path, reason: str, remedy: str = "Make room, or bring the directory back,") -> None:
        super().__init__(
            f"the run directory {str(path)!r} cannot be written: {reason}. {remedy} and start the same command again: "
            "it resumes from the newest checkpoint."
        )


class RunDirectory:
    """An open run directory: configuration and events of one run. Any thread may write events.

    Each method raises RunDirectoryError if it cannot be written, such as on a full disk.
    """

    def __init__(
        self, path: Path, *, may_write: Callable[[], None] = lambda: None, on_close: Callable[[], None] = lambda: None
    ) -> None:
        """``may_write`` raises where another process has taken over; ``on_close`` lets go of the directory."""
        self.path, self.may_write = path, may_write
        self.checkpoints, self.tensorboard = path / "checkpoints", path / "tensorboard"
        self.at_end: dict[str, Any] = {}  # what the ``end`` event holds besides the end
        self._on_close = on_close
        self._lock = threading.Lock()
        self._is_cut_off = self._has_ended = False
        with self._explaining():
            self._metrics = _open_metrics(path)

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Keep the configuration; ``--config`` reads it back."""
        self._write(CONFIG_FILE, yaml.safe_dump(dict(values), sort_keys=False))

    def write_identity(self, identity: Mapping[str, Any]) -> None:
        """Keep which run it is (see ``ringtrain.run.identity``), if it is not kept already."""
        if read_identity(self.path) != identity:
            self._write(IDENTITY_FILE, json.dumps(dict(identity)) + "\n")

    def _write(self, name: str, text: str) -> None:
        self.may_write()
        with self._explaining():
            replace_text(self.path / name, text)

    def write_event(self, event: str, **values: Any) -> None:
        """Append one line to metrics.jsonl, with the time (seconds since 1970).

        JSON has no infinities or NaN: such numbers are written as strings. The end is the last event: a warning that
        comes later, of another thread whose console has gone for example, is left out.
        """
        line = _line_of(event, values).encode()
        with self._lock:
            if self._has_ended and event == "warning":
                return
            self.may_write()
            self._append(line)
            self._has_ended |= event == "end"

    def _append(self, line: bytes) -> None:
        """Write a line; a part of one that a full disk left becomes a line that readers skip."""
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
            with replacing(path) as kept:
                kept.writelines(line.rstrip(b"\n") + b"\n" for line in read_lines(path) if _is_kept(line, step))
            self._metrics = _open_metrics(self.path)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Explain a file that cannot be written, with the remedy."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno == errno.EFBIG and error.filename:  # of what was to be read
                raise RunDirectoryError(self.path, reason, "Move that file out of it,") from error
            raise RunDirectoryError(self.path, reason) from error

    def close(self) -> None:
        self._metrics.close()
        self._on_close()


def _open_metrics(path: Path) -> io.FileIO:
    """Unbuffered, so that what could not be written once is not written later in the middle of something else."""
    return io.FileIO(open_descriptor(path / METRICS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a")


def append_event(path: Path, event: str, **values: Any) -> None:
    """Append one line to metrics.jsonl of a run whose writer is gone, perhaps in the middle of a line."""
    with open(open_descriptor(path / METRICS_FILE, os.O_RDWR), "rb+") as metrics:
        size = metrics.seek(0, os.SEEK_END)
        metrics.seek(max(0, size - 1))
        cut_off = metrics.read() not in (b"", b"\n")
        metrics.write((("\n" if cut_off else "") + _line_of(event, values)).encode())


def create_run_directory(wanted: Path, *, is_anew: bool = False) -> Path:
    """Make the directory of a run if there is none, and return its path.

    One ``is_anew`` never takes one that is there: a number is appended until the name is free.
    """
    named = wanted if wanted.name.strip(".") else wanted.resolve()  # '.' and '..' say no name
    others = (named.parent / f"{named.name or 'run'}-{number}" for number in range(2, 10_000))
    for candidate in itertools.chain([wanted], others):
        try:
            candidate.mkdir(parents=True)  # fails if it exists, so that two runs that start together never share one
            return candidate
        except FileExistsError:
            if not is_anew:
                break
        except OSError as error:
            raise UsageError(
                f"the run directory {str(wanted)!r} cannot be made: {error.strerror}. Give another with --out."
            ) from error
    if not wanted.is_dir() or (_holds_something(wanted) and not (wanted / CONFIG_FILE).is_file()):
        if (wanted / "checkpoints").is_dir():  # a copy that broke off: nobody is to remove what it still has
            raise UsageError(
                f"out is {str(wanted)!r}, which has checkpoints, but no {CONFIG_FILE}: half a run. Bring the file back "
                "from where the run was copied, or give another directory with --out."
            )
        if not wanted.is_dir():
            raise UsageError(f"out is {str(wanted)!r}, which is no directory. Give another with --out.")
        raise UsageError(
            f"out is {str(wanted)!r}, which is not empty and holds no run of ringtrain. Give another with --out, or "
            "remove it."
        )
    return wanted


def refuse_taken(output: Path) -> None:
    """See that nothing will be overwritten."""
    if output.exists() or output.is_symlink():
        raise UsageError(
            f"{str(output)!r} is there already, and is left as it is. Give another with --output, or remove it."
        )


def read_config(path: Path) -> dict[str, Any] | None:
    """The configuration that a run directory keeps; None if it holds none."""
    file = path / CONFIG_FILE
    try:
        values = load_settings(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(
            f"{str(file)!r} cannot be read: {error.strerror}. Restore it, or start a new run with --resume never."
        ) from None
    except (yaml.YAMLError, ValueError):
        values = None
    if not isinstance(values, dict) or not isinstance(values.get("optimizer"), dict):
        raise UsageError(
            f"{str(file)!r} is damaged: it holds no settings of a run. Restore it, or start a new run with "
            "--resume never."
        )
    return values


class _Loader(yaml.SafeLoader):
    """YAML's plain values, each key once; what it merges (``<<``) does not grow without end."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<")
        twice = next((key for key, count in keys.items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"the key {twice!r} stands there twice")
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_SETTINGS:
            raise ValueError(f"it has more than {MAX_SETTINGS:,} values")


def load_settings(file: Path, *, follows_links: bool = False) -> Any:
    """Load a YAML file of settings: plain values; an alias counts each time that it is used."""
    text = read_bounded(file, MAX_CONFIG_BYTES, follows_links=follows_links).decode()
    try:
        values = _Loader(text).get_single_data()
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    require_plain(values, max_values=MAX_SETTINGS)
    return values


def _holds_something(path: Path) -> bool:
    """True if a directory holds more than the lease of a run that has not begun to write."""
    entries = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    return any(entry.name != METRICS_FILE or (entry.exists() and entry.stat().st_size > 0) for entry in entries)


def read_lines(file: Path) -> Iterator[bytes]:
    """The lines of a file of events; of one that is too long to be an event, its beginning."""
    with open_regular(file) as lines:
        require_at_most(lines, MAX_METRICS_BYTES, file)
        while line := lines.readline(MAX_LINE_BYTES):
            yield line
            while len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = lines.readline(MAX_LINE_BYTES)


def parse_event(line: bytes) -> dict[str, Any] | None:
    """One event of metrics.jsonl; None if the line is none. A time that no calendar has is left out."""
    try:
        event = parse_json(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    step = event.get("step")
    has_step = type(step) is int and 0 <= step < MAX_STEP
    if not has_step and (step is not None or event["event"] in NEED_A_STEP):
        return None
    if type(event.get("time")) in (int, float) and not abs(event["time"]) < MAX_TIME:
        del event["time"]
    return event


def find_last_saved_step(path: Path) -> int | None:
    """The newest step of which a run's events say that its checkpoint was saved; None if none was."""
    saved = find_events(path, "checkpoint")
    # The best one alone is nothing to resume from.
    return max((event["step"] for event in saved if "/best-" not in str(event.get("path"))), default=None)


def find_events(path: Path, kind: str) -> list[dict[str, Any]]:
    """A run's events of one kind, in their order; none if it has no metrics.jsonl."""
    word = f'"{kind}"'.encode()
    try:
        events = [parse_event(line) for line in read_lines(path / METRICS_FILE) if word in line]
    except FileNotFoundError:
        return []
    return [event for event in events if event and event["event"] == kind]


def refuse_other_kinds(run: Path) -> None:
    """Refuse a run directory in which something else has the name of a file that is read and written."""
    for path in (run / METRICS_FILE, run / IDENTITY_FILE, *sorted((run / "tensorboard").glob("*tfevents*"))):
        try:
            require_regular(path)
        except OSError as error:
            raise UsageError(
                f"{str(path)!r} cannot be used: {error.strerror}. Nothing in a run directory is followed, such as a "
                "link. Move it away, or restore the file, and start the same command again."
            ) from error


def require_writable(directory: Path) -> None:
    """See that files can be made in a directory of a run's. If none has its name, it can still be made."""
    if not os.path.lexists(directory):
        return
    try:
        with open_directory(directory), tempfile.TemporaryFile(dir=directory):
            return
    except OSError as error:
        raise UsageError(
            f"nothing can be written into {str(directory)!r}, as this run has to: {error.strerror}. Mend it, move a "
            "whole run to another disk instead of a part of it, or give another directory with --out."
        ) from error


def _is_kept(line: bytes, step: int) -> bool:
    event = parse_event(line)
    return event is not None and (event["event"] not in STEP_EVENTS or (event.get("step") or 0) <= step)


def _line_of(event: str, values: Mapping[str, Any]) -> str:
    odd = {key: str(value) for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps({"event": event, **values, **odd, "time": round(time.time(), 3)}) + "\n"
