"""Interface of experiment trackers."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ringtrain.errors import UsageError

PROJECT = "ringtrain"


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    id: str  # equal in all starts of a run
    path: Path  # its directory
    name: str
    parameters: Mapping[str, Any]  # flat, such as {"optimizer.lr": 0.01}
    tags: Mapping[str, str]


class Row(NamedTuple):
    step: int
    time: float  # seconds since 1970
    values: dict[str, float]


class Tracker(Protocol):
    """A run at a tracker. All methods may raise anything; they are then called again."""

    def start(self, run: TrackedRun) -> None:
        """Continue the run of this id, or create it."""

    def log(self, rows: Sequence[Row]) -> None: ...

    def end(self, status: str, tags: Mapping[str, str], files: Sequence[Path]) -> None:
        """``status``: as in the ``end`` event."""


def require_installed(names: Sequence[str]) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"tracker is {name!r}, which is not installed. Install it: pip install 'ringtrain[{name}]'"
            )


def create_tracker(name: str) -> Tracker:
    tracker: Tracker = importlib.import_module(f"ringtrain.tracking.{name}_tracker").create()
    return tracker
