"""The identity of a run, created at its first start, in its directory and checkpoints."""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringtrain.errors import UsageError
from ringtrain.files.bounded import read_small
from ringtrain.run.checkpoint import read_facts

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
