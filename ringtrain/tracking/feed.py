"""Sends what a run has logged to a tracker, each step once.

``tracker-NAME.json`` in the run directory holds the last steps sent, by address: the next start sends the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ringtrain.config import flatten_settings
from ringtrain.errors import UsageError
from ringtrain.files.atomic import replace_text
from ringtrain.files.bounded import open_regular, read_small, require_at_most
from ringtrain.run.directory import (
    CONFIG_FILE,
    MAX_LINE_BYTES,
    MAX_METRICS_BYTES,
    MAX_TIME,
    METRICS_FILE,
    REPORT_FILE,
    find_best_evaluation,
    find_events,
    parse_event,
    read_config,
    read_identity,
)
from ringtrain.tracking.base import Row, TrackedRun, Tracker, create_tracker, hide_secrets

KINDS = ("train", "eval")
NOT_METRICS = {"event", "step", "time"}
MAX_VALUE = 1e300  # of a float
TAGS: tuple[str, ...] = ("size", "launcher", "git_revision")  # of the ``start`` event
MAX_TAG = 5000  # characters; MLflow refuses more
ROWS = 100  # in a message


class Feed:
    def __init__(self, path: Path, name: str, *, begun: float = 0.0, tracker: Tracker | None = None) -> None:
        """``begun``: seconds since 1970; what is earlier is of another start."""
        self._path, self._begun, self._tracker = path, begun, tracker or create_tracker(name)
        self._file = path / f"tracker-{name}.json"
        self._address = hide_secrets(self._tracker.address.partition("?")[0])
        self._others = read_small(self._file)
        sent = self._others.pop(self._address, None)
        sent = sent if isinstance(sent, dict) else {}
        self._sent = {kind: sent[kind] if type(sent.get(kind)) is int else -1 for kind in KINDS}
        self._place = 0  # in metrics.jsonl, after what was read and sent
        self._has_started = False

    def send(self, *, ends: bool = True, is_dead: bool = False) -> None:
        """Send all that is new, and the end if the run has logged it. Raises what the tracker raises.

        ``ends``: False if the report of an ended run may not be written yet. ``is_dead``: a run without an end was
        killed.
        """
        events, place = self._read_new()
        of_start = [event for event in events if read_time(event) >= self._begun]
        end = of_start[-1] if ends and of_start and of_start[-1]["event"] == "end" else None
        if is_dead and end is None:
            end = {"status": "killed"}
        if not self._has_started and not end and not any(event["event"] == "start" for event in of_start):
            return
        if not self._has_started:
            self._tracker.start(describe_run(self._path, events))
            self._has_started = True
        rows = [event for event in events if event["event"] in KINDS and event["step"] > self._sent[event["event"]]]
        for begin in range(0, len(rows), ROWS):
            self._tracker.log([to_row(event) for event in rows[begin : begin + ROWS]])
            for event in rows[begin : begin + ROWS]:
                self._sent[event["event"]] = event["step"]
            replace_text(self._file, json.dumps({**self._others, self._address: self._sent}) + "\n")
        if end is not None:
            self._end(end)
        if ends or not events or events[-1]["event"] != "end":
            self._place = place

    def _end(self, end: Mapping[str, Any]) -> None:
        exports = self._path / "export"
        models = [] if exports.is_symlink() else sorted(exports.glob("*.keras"))
        files = [self._path / REPORT_FILE, self._path / CONFIG_FILE, *models]
        tags = {name: str(end[name]) for name in ("status", "exit_code", "message") if name in end}
        config = read_config(self._path) or {}
        if best := find_best_evaluation(find_events(self._path, "eval"), config):
            metric = str(config.get("best_metric", "loss"))
            tags |= {f"best.{metric}": str(best[metric]), "best.step": str(best["step"])}
        self._tracker.end(
            str(end.get("status")), tags, [file for file in files if file.is_file() and not file.is_symlink()]
        )
        self._has_started = False

    def _read_new(self) -> tuple[list[dict[str, Any]], int]:
        """Return events and the place after them."""
        lines: list[bytes] = []
        with contextlib.suppress(FileNotFoundError), open_regular(self._path / METRICS_FILE) as file:
            require_at_most(file, MAX_METRICS_BYTES, self._path / METRICS_FILE)
            if file.seek(0, os.SEEK_END) < self._place:  # a resumed run has cut it
                self._place = 0
            file.seek(self._place)
            lines.extend(iter(lambda: file.readline(MAX_LINE_BYTES), b""))
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        events = [event for line in lines if (event := parse_event(line)) is not None]
        return events, self._place + sum(map(len, lines))


def describe_run(path: Path, events: list[dict[str, Any]]) -> TrackedRun:
    config, identity = read_config(path), read_identity(path)
    if config is None or identity is None:
        raise UsageError(f"{str(path)!r} is no run directory of this version. Give the directory of a run.")
    starts: list[dict[str, Any]] = [event for event in events if event["event"] == "start"]
    start = starts[-1] if starts else {}
    tags: dict[str, str] = {name: str(start[name]) for name in TAGS if start.get(name) is not None}
    ranks, versions = start.get("ranks"), start.get("versions")
    nodes = [rank.get("node") for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    tags |= _list_tag("nodes", nodes) | _list_tag("jobs", (event.get("job") for event in starts))
    tags |= {f"version.{name}": str(value) for name, value in versions.items()} if isinstance(versions, dict) else {}
    return TrackedRun(
        id=str(identity["id"]), path=path, name=path.resolve().name, parameters=flatten_settings(config), tags=tags
    )


def _list_tag(name: str, values: Iterable[Any]) -> dict[str, str]:
    text = ", ".join(dict.fromkeys(str(value) for value in values if value is not None))
    return {name: text[:MAX_TAG]} if text else {}


def to_row(event: Mapping[str, Any]) -> Row:
    kind = event["event"]
    values = {
        f"{kind}/{name}": float(value)
        for name, value in event.items()
        if name not in NOT_METRICS and type(value) in (int, float) and abs(value) < MAX_VALUE
    }
    return Row(event["step"], read_time(event), values)


def read_time(event: Mapping[str, Any]) -> float:
    """Return seconds since 1970; 0 if unknown."""
    time = event.get("time")
    return float(time) if isinstance(time, int | float) and 0 <= time <= MAX_TIME else 0.0
