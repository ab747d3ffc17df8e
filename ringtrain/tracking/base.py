"""Interface of experiment trackers."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ringtrain.errors import RingtrainError, UsageError
from ringtrain.messages.defects import describe_defect

PROJECT = "ringtrain"
SECRETS = (
    "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
)  # fmt: skip
# MLflow tries for minutes otherwise.
DEFAULTS = {
    "MLFLOW_LOGGING_LEVEL": "ERROR", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "WANDB_SILENT": "true",
}  # fmt: skip


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

    address: str  # server or directory, and project; each has its own steps sent

    def start(self, run: TrackedRun) -> None:
        """Continue the run of this id, or create it."""

    def log(self, rows: Sequence[Row]) -> None: ...

    def end(self, status: str, tags: Mapping[str, str], files: Sequence[Path]) -> None:
        """``status``: as in the ``end`` event."""


def require_installed(names: Sequence[str]) -> None:
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a directory of that name is no package
            raise UsageError(
                f"tracker is {name!r}, which is not installed. Install it: pip install 'ringtrain[{name}]'"
            )


def require_store(address: str | None) -> None:
    """Raise UsageError if an address cannot hold a copy, or its package is not installed."""
    if address is None:
        return
    protocol, _, location = address.partition("://")
    if protocol == "memory":
        raise UsageError(f"{address!r} is the memory of a process, and lost with it. Give another address.")
    if protocol in ("file", "local") and not location.startswith("/"):
        raise UsageError(
            f"{address!r} is relative to the working directory; it must be absolute, such as "
            f"{protocol}://{Path(location).absolute()}."
        )
    try:
        import fsspec

        fsspec.get_filesystem_class(fsspec.utils.get_protocol(address))
    except (ImportError, ValueError) as error:
        remedy = "Install it: pip install 'ringtrain[s3]'" if address.startswith("s3:") else "Install its package."
        raise UsageError(f"copy_to is {address!r}, which cannot be used: {error}. {remedy}") from None


def describe_failure(error: Exception) -> str:
    return hide_secrets(str(error) if isinstance(error, RingtrainError) else describe_defect(error))


def hide_secrets(text: str) -> str:
    """Replace user names, passwords and keys."""
    text = re.sub(r"//[^/@\s]+@", "//***@", text)
    for name in SECRETS:
        if secret := os.environ.get(name):
            text = text.replace(secret, "***")
    return text


def create_tracker(name: str) -> Tracker:
    tracker: Tracker = importlib.import_module(f"ringtrain.tracking.{name}_tracker").create()
    return tracker
