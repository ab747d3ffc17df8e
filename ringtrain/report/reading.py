"""Contents of run directories."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtrain.config import flatten_settings
from ringtrain.errors import DataError, UsageError
from ringtrain.report.event_files import ImageSet, list_event_files, read_images
from ringtrain.run.checkpoint import read_facts
from ringtrain.run.directory import (
    CONFIG_FILE,
    FIT_OF,
    FIT_SETTINGS,
    MAX_LINE_BYTES,
    METRICS_FILE,
    parse_event,
    read_config,
    read_lines,
)
from ringtrain.run.store import list_steps, step_name


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    path: Path  # as given
    settings: dict[str, Any] = field(default_factory=dict)  # flat, such as {"optimizer.lr": 0.01}
    events: list[dict[str, Any]] = field(default_factory=list)  # in order
    num_unreadable: int = 0  # invalid lines, except an incomplete last one
    facts: dict[str, Any] = field(default_factory=dict)  # of its latest checkpoint
    images: dict[str, ImageSet] = field(default_factory=dict)  # by name

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def read_run(path: Path) -> RunRecord:
    """Raise UsageError without contents. The run may be active."""
    try:
        config = read_config(path)
        lines = read_lines(path / METRICS_FILE) if config is not None else ()
        events, num_unreadable = parse_events(lines)
    except OSError as error:
        raise UsageError(f"{error.filename!r} cannot be read: {error.strerror}. Give the directory of a run.") from None
    if config is None:
        raise UsageError(
            f"{str(path)!r} is no run directory: it holds no {CONFIG_FILE}. Give the directory of a run, such as "
            "runs/digits."
        )
    if not events:
        why = "it contains no event" if num_unreadable else "it is empty"
        raise UsageError(
            f"{str(path / METRICS_FILE)!r} holds nothing to report: {why}. Report a run that has begun, or bring the "
            "file back."
        )
    return RunRecord(
        path=path,
        settings=flatten_settings(choose_settings(config)),
        events=events,
        num_unreadable=num_unreadable,
        facts=read_newest_facts(path / "checkpoints"),
        images=read_images(list_event_files(path / "tensorboard")),
    )


def choose_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    is_fit = str(config.get("workload")).startswith(FIT_OF)
    return {name: value for name, value in config.items() if not is_fit or name in FIT_SETTINGS}


def parse_events(lines: Iterable[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Return events and the number of invalid lines."""
    events, num_unreadable = [], 0
    for line in lines:
        event = parse_event(line)
        if event is not None:
            events.append(event)
        elif line.strip() and (line.endswith(b"\n") or len(line) == MAX_LINE_BYTES):  # else incomplete
            num_unreadable += 1
    return events, num_unreadable


def read_newest_facts(checkpoints: Path) -> dict[str, Any]:
    steps: Sequence[int] = ()
    with contextlib.suppress(OSError):
        steps = list_steps(checkpoints)
    for step in reversed(steps):
        with contextlib.suppress(DataError):
            return read_facts(checkpoints / step_name(step))
    return {}
