"""The run directory: where one run keeps everything. Rank 0 alone writes into it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ringtrain.errors import UsageError

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"


class RunDirectory:
    """An open run directory: configuration and events of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = (path / METRICS_FILE).open("a", encoding="utf-8")

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Keep the configuration; ``--config`` reads it back."""
        (self.path / CONFIG_FILE).write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")

    def write_event(self, event: str, **values: Any) -> None:
        """Append one line to metrics.jsonl. JSON has no infinities or NaN: such numbers are written as strings."""
        line = json.dumps({"event": event, **{key: _json_value(value) for key, value in values.items()}})
        self._metrics.write(line + "\n")
        self._metrics.flush()

    def close(self) -> None:
        self._metrics.close()


def create_run_directory(wanted: Path, *, is_exact: bool) -> Path:
    """Make a fresh run directory and return its path.

    Args:
        wanted: where the user wants the run.
        is_exact: True where the user named the directory: it must be empty or absent. Otherwise a number is appended
            until the name is free.

    Raises:
        UsageError: the directory holds something, or cannot be made.
    """
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_be_made(wanted, error) from error
    candidates = [wanted, *(wanted.with_name(f"{wanted.name}-{number}") for number in range(2, 10_000))]
    for candidate in candidates[:1] if is_exact else candidates:
        try:
            candidate.mkdir()  # fails where it exists, so that two runs that start together never share one
        except FileExistsError:
            if is_exact and candidate.is_dir() and not any(candidate.iterdir()):
                return candidate
        except OSError as error:
            raise _cannot_be_made(candidate, error) from error
        else:
            return candidate
    raise UsageError(f"out is {str(wanted)!r}, which is not empty. Give a fresh directory with --out, or remove it.")


def _cannot_be_made(path: Path, error: OSError) -> UsageError:
    return UsageError(f"the run directory {str(path)!r} cannot be made: {error.strerror}. Give another with --out.")


def _json_value(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
