"""Trackio: its database in TRACKIO_DIR; on a network file system, files there that its dashboard imports."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trackio import fragments, utils

from ringtrain.tracking.base import PROJECT, Row, TrackedRun


class TrackioTracker:
    """Sends records as Trackio's own client does, which sends them later, hides failures and may send them twice.

    A record whose id is there already is ignored.
    """

    def __init__(self) -> None:
        self.address = f"{utils.TRACKIO_DIR} {PROJECT}"
        is_shared = utils.get_storage_mode() == "jsonl"
        self._write = fragments.FragmentWriter().write_local if is_shared else fragments.import_records
        self._run: TrackedRun | None = None
        self._config: dict[str, Any] = {}
        self._step = 0

    def start(self, run: TrackedRun) -> None:
        self._run, self._config = run, {**run.parameters, **run.tags, "status": "running"}

    def log(self, rows: Sequence[Row]) -> None:
        entries = [  # with ids such as RUN-train/epoch-10
            self._entry(row.step, row.time, "log_id", next(iter(row.values))) | {"metrics": row.values}
            for row in rows
            if row.values
        ]
        self._write([fragments.metric_record(entry | {"config": self._config}) for entry in entries])
        self._step = rows[-1].step

    def end(self, status: str, tags: Mapping[str, str], files: Sequence[Path]) -> None:
        """Sends no files: Trackio has them only of its own client."""
        now, level = time.time(), "info" if status in ("completed", "preempted") else "error"
        row = self._entry(self._step, now, "log_id", "end") | {"config": {**self._config, **tags, "status": status}}
        alert = {"title": f"end: {status}", "text": tags.get("message"), "level": level}
        alert |= self._entry(self._step, now, "alert_id", f"end-{status}")
        self._write([fragments.metric_record(row), fragments.alert_record(alert)])

    def _entry(self, step: int, seconds: float, id_name: str, kind: str) -> dict[str, Any]:
        assert self._run is not None
        name, run = self._run.name, self._run.id
        timestamp = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat()
        return {
            "project": PROJECT, "run": name, "run_id": run, "step": step, "timestamp": timestamp,
            id_name: f"{run}-{kind}-{step}",
        }  # fmt: skip


create = TrackioTracker
