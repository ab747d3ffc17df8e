"""Files that other processes may write or read at any time."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(*names: str) -> Path:
    """A directory in ``$XDG_CACHE_HOME/ringtrain`` or ``~/.cache/ringtrain``; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().joinpath("ringtrain", *names)
