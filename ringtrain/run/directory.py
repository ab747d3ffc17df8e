"""The run directory, written by rank 0 only."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import math
import os
import re
import secrets
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ringtrain.errors import HangError, RingtrainError, UsageError
from ringtrain.files.atomic import replace_text, replacing, require_regular
from ringtrain.files.bounded import (
    open_descriptor,
    open_directory,
    open_regular,
    parse_json,
    read_bounded,
    read_small,
    require_at_most,
    require_plain,
)
from ringtrain.run.checkpoint import read_facts

METRICS_FILE = "metrics.jsonl"
FIT_OF = "fit of "  # prefix of a callbacks.Run's workload, before the script's name
FIT_SETTINGS = (
    "workload", "options", "out", "epochs", "log_every", "best_metric", "best_direction", "checkpoint_every", "keep",
    "resume", "check_replicas_every", "hang_timeout", "max_hours", "tracker",
)  # fmt: skip
CONFIG_FILE = "config.yaml"
REPORT_FILE = "report.html"
MAX_CONFIG_BYTES = 64 * 2**10  # usually about two KiB
MAX_SETTINGS = 10_000
MAX_LINE_BYTES = 2**20  # per line of metrics.jsonl
MAX_METRICS_BYTES = 4 * 2**30  # about ten million events
MAX_STEP = 2**53  # largest integer that JSON readers agree on
MAX_TIME = 2.5e11  # seconds since 1970: year 9892, the limit of calendars
# Events ordered by step; others follow the events before them.
NEED_A_STEP = ("train", "eval", "checkpoint")
# Trained again after a checkpoint; starts and ends remain.
STEP_EVENTS = ("train", "eval", "checkpoint", "warning")


class RunDirectoryError(RingtrainError):
    def __init__(self, path: Path, reason: str, remedy: str = "Make room, or bring the directory back,") -> None:
        super().__init__(
            f"the run directory {str(path)!r} cannot be written: {reason}. {remedy} and start the same command again: "
            "it resumes from the newest checkpoint."
        )


class RunDirectory:
    """An open run directory. Events are thread-safe; methods raise RunDirectoryError if a write fails."""

    def __init__(
        self, path: Path, *, may_write: Callable[[], None] = lambda: None, on_close: Callable[[], None] = lambda: None
    ) -> None:
        """``may_write`` raises after a takeover; ``on_close`` releases the directory."""
        self.path, self.may_write = path, may_write
        self.checkpoints, self.tensorboard = path / "checkpoints", path / "tensorboard"
        self.at_end: dict[str, Any] = {}
        self.interrupted_at: float | None = None  # time of the last ``train`` before a failure
        self._on_close = on_close
        self._lock = threading.Lock()
        self._is_cut_off = self._has_ended = False
        with self._explaining():
            self._metrics = _open_metrics(path)

    def write_config(self, values: Mapping[str, Any]) -> None:
        self._write(CONFIG_FILE, yaml.safe_dump(dict(values), sort_keys=False))

    def write_identity(self, identity: Mapping[str, Any]) -> None:
        if read_identity(self.path) != identity:
            self._write(IDENTITY_FILE, json.dumps(dict(identity)) + "\n")

    def _write(self, name: str, text: str) -> None:
        self.may_write()
        with self._explaining():
            replace_text(self.path / name, text)

    def write_event(self, event: str, **values: Any) -> None:
        """Append to metrics.jsonl, with the time (seconds since 1970).

        Infinity and NaN become strings. Warnings after the end are dropped.
        """
        line = _line_of(event, values).encode()
        with self._lock:
            if self._has_ended and event == "warning":
                return
            self.may_write()
            data = (b"\n" if self._is_cut_off else b"") + line
            with self._explaining():
                while data:  # a full disk leaves a partial line, which readers skip
                    data = data[self._metrics.write(data) :]
                    self._is_cut_off = bool(data)
            self._has_ended |= event == "end"

    def forget_after(self, step: int) -> None:
        """Also drop a truncated line."""
        with self._lock, self._explaining():
            self.may_write()
            self._metrics.close()
            path = self.path / METRICS_FILE
            with replacing(path) as kept:
                for line in read_lines(path):
                    event = parse_event(line)
                    if event is not None:
                        self.interrupted_at = _interruption_after(event, self.interrupted_at)
                        if event["event"] not in STEP_EVENTS or (event.get("step") or 0) <= step:
                            kept.write(line.rstrip(b"\n") + b"\n")
            self._metrics = _open_metrics(self.path)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno == errno.EFBIG and error.filename:
                raise RunDirectoryError(self.path, reason, "Move that file out of it,") from error
            raise RunDirectoryError(self.path, reason) from error

    def close(self) -> None:
        self._metrics.close()
        self._on_close()


def _open_metrics(path: Path) -> io.FileIO:
    """Open unbuffered: a failed write must not appear later."""
    return io.FileIO(open_descriptor(path / METRICS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a")


def append_event(path: Path, event: str, **values: Any) -> None:
    """Append for a writer that is gone, maybe in mid-line."""
    with open(open_descriptor(path / METRICS_FILE, os.O_RDWR), "rb+") as metrics:
        size = metrics.seek(0, os.SEEK_END)
        metrics.seek(max(0, size - 1))
        cut_off = metrics.read() not in (b"", b"\n")
        metrics.write((("\n" if cut_off else "") + _line_of(event, values)).encode())


def create_run_directory(wanted: Path, *, is_anew: bool = False) -> Path:
    """If ``is_anew``, append numbers until the path is free."""
    named = wanted if wanted.name.strip(".") else wanted.resolve()
    others = (named.parent / f"{named.name or 'run'}-{number}" for number in range(2, 10_000))
    for candidate in itertools.chain([wanted], others):
        try:
            candidate.mkdir(parents=True)  # fails if it exists: simultaneous runs never share one
            return candidate
        except FileExistsError:
            if not is_anew:
                break
        except OSError as error:
            raise UsageError(
                f"the run directory {str(wanted)!r} cannot be made: {error.strerror}. Give another with --out."
            ) from error
    if not wanted.is_dir() or (_holds_something(wanted) and not (wanted / CONFIG_FILE).is_file()):
        if (wanted / "checkpoints").is_dir():  # an interrupted copy, not to be removed
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
    if output.exists() or output.is_symlink():
        raise UsageError(
            f"{str(output)!r} exists already, and is not changed. Give another with --output, or remove it."
        )


def read_config(path: Path) -> dict[str, Any] | None:
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
    """Refuse duplicate keys; bound merges (``<<``)."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<")
        twice = next((key for key, count in keys.items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"the key {twice!r} is there twice")
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_SETTINGS:
            raise ValueError(f"it has more than {MAX_SETTINGS:,} values")


def load_settings(file: Path, *, follows_links: bool = False) -> Any:
    text = read_bounded(file, MAX_CONFIG_BYTES, follows_links=follows_links).decode()
    try:
        values = _Loader(text).get_single_data()
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    require_plain(values, max_values=MAX_SETTINGS)
    return values


def _holds_something(path: Path) -> bool:
    entries = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    return any(entry.name != METRICS_FILE or (entry.exists() and entry.stat().st_size > 0) for entry in entries)


def read_lines(file: Path) -> Iterator[bytes]:
    """Yield lines; of those that are too long, only the start."""
    with open_regular(file) as lines:
        require_at_most(lines, MAX_METRICS_BYTES, file)
        while line := lines.readline(MAX_LINE_BYTES):
            yield line
            while len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = lines.readline(MAX_LINE_BYTES)


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return None if invalid; drop an invalid time."""
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


def find_events(path: Path, kind: str) -> list[dict[str, Any]]:
    word = f'"{kind}"'.encode()
    try:
        events = [parse_event(line) for line in read_lines(path / METRICS_FILE) if word in line]
    except FileNotFoundError:
        return []
    return [event for event in events if event and event["event"] == kind]


def find_best_evaluation(
    evaluations: Iterable[dict[str, Any]], settings: Mapping[str, Any], metric: str | None = None
) -> dict[str, Any] | None:
    """``metric``: the run's own by default."""
    name = metric or str(settings.get("best_metric", "loss"))
    scored = [event for event in evaluations if type(event.get(name)) in (int, float)]
    choose = max if settings.get("best_direction") == "max" else min
    return choose(scored, key=lambda event: event[name], default=None)


def refuse_other_kinds(run: Path) -> None:
    """Refuse links and special files."""
    for path in (run / METRICS_FILE, run / IDENTITY_FILE, *sorted((run / "tensorboard").glob("*tfevents*"))):
        try:
            require_regular(path)
        except OSError as error:
            raise UsageError(
                f"{str(path)!r} cannot be used: {error.strerror}. Nothing in a run directory is followed, such as a "
                "link. Move it away, or restore the file, and start the same command again."
            ) from error


def require_writable(directory: Path) -> None:
    """Raise UsageError if it exists and cannot be written."""
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


def _interruption_after(event: Mapping[str, Any], before: float | None) -> float | None:
    """Return the time of the last ``train`` event, unless the run has ended in good order since."""
    if event["event"] == "train":
        return event["time"] if type(event.get("time")) in (int, float) else None
    is_pause = event["event"] == "end" and event.get("exit_code") not in (RingtrainError.exit_code, HangError.exit_code)
    return None if is_pause else before


def _line_of(event: str, values: Mapping[str, Any]) -> str:
    odd = {key: str(value) for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps({"event": event, **values, **odd, "time": round(time.time(), 3)}) + "\n"


IDENTITY_FILE = "run.json"
RULES = {
    "id": r"[0-9a-f]{16}",
    "started": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ",
    "host": r"[\w.-]{1,255}",
    "seed": r"-?\d{1,30}",
}


def draw_identity(seed: int) -> dict[str, Any]:
    host = re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)[:255] or "_"
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"id": secrets.token_hex(8), "started": started, "host": host, "seed": seed}


def as_identity(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict) or value.keys() != RULES.keys():
        return None
    is_one = all(re.fullmatch(rule, str(value[name]), re.ASCII) for name, rule in RULES.items())
    return dict(value) if is_one else None


def read_identity(run: Path) -> dict[str, Any] | None:
    return as_identity(read_small(run / IDENTITY_FILE))


def require_own(run: Path, path: Path) -> Path:
    own, theirs = read_identity(run), as_identity(read_facts(path).get("identity"))
    if own and theirs and own["id"] != theirs["id"]:
        raise UsageError(
            f"the checkpoint {str(path)!r} is of {describe_identity(theirs)}, and {str(run)!r} is that of "
            f"{describe_identity(own)}. Put it back into the directory of its run, and name that."
        )
    return path


def describe_identity(identity: Mapping[str, Any] | None) -> str:
    """For example ``run 1f3a9c2e (seed 3, started 2026-11-23T20:11:02Z on node7)``."""
    if identity is None:
        return "a run without identity, of an older ringtrain"
    return f"run {identity['id'][:8]} (seed {identity['seed']}, started {identity['started']} on {identity['host']})"
