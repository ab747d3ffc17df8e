"""What a run directory says about its run: configuration, events, environment, images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtrain.config import flatten_settings
from ringtrain.errors import DataError, UsageError
from ringtrain.report.event_files import ImageSet, read_images
from ringtrain.run.checkpoint import read_facts
from ringtrain.run.directory import (
    CONFIG_FILE,
    MAX_LINE_BYTES,
    METRICS_FILE,
    parse_event,
    read_config,
    read_lines,
)
from ringtrain.run.store import list_steps, step_name


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a report knows of a run.

    Attributes:
        path: its directory, as the user named it.
        settings: its configuration, flat, such as ``{"optimizer.lr": 0.01}``.
        events: its events in their order; those that need a step have one.
        num_unreadable: lines of its events that are no event; the last one, cut off while it is written, is none of
            them.
        facts: what its newest checkpoint says of the program that wrote it; empty without one.
        images: what its workload showed, by name.
    """

    path: Path
    settings: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    num_unreadable: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    images: dict[str, ImageSet] = field(default_factory=dict)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event for event in self.events if event["event"] == kind]


def read_run(path: Path) -> RunRecord:
    """Read a run directory, whose run may be under way.

    Raises:
        UsageError: it is no run directory, or holds nothing that can be shown.
    """
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
        why = "none of its lines is an event" if num_unreadable else "it is empty"
        raise UsageError(
            f"{str(path / METRICS_FILE)!r} holds nothing to report: {why}. Report a run that has begun, or bring the "
            "file back."
        )
    return RunRecord(
        path=path,
        settings=flatten_settings(config),
        events=events,
        num_unreadable=num_unreadable,
        facts=read_newest_facts(path / "checkpoints"),
        images=read_images(sorted((path / "tensorboard").glob("*tfevents*"))),
    )


def parse_events(lines: Iterable[bytes]) -> tuple[list[dict[str, Any]], int]:
    """The events of a metrics.jsonl, and how many whole lines are none."""
    events, num_unreadable = [], 0
    for line in lines:
        event = parse_event(line)
        if event is not None:
            events.append(event)
        elif line.strip() and (line.endswith(b"\n") or len(line) == MAX_LINE_BYTES):  # else it is being written
            num_unreadable += 1
    return events, num_unreadable


def read_newest_facts(checkpoints: Path) -> dict[str, Any]:
    """What the newest checkpoint that can be read says of the program that wrote it."""
    for step in reversed(_existing_steps(checkpoints)):
        with contextlib.suppress(DataError):
            return read_facts(checkpoints / step_name(step))
    return {}


def _existing_steps(checkpoints: Path) -> Sequence[int]:
    try:
        return list_steps(checkpoints)
    except OSError:
        return []
