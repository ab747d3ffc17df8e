"""Files that other processes may write or read at any time; and the place of those that a user's runs share."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(*names: str) -> Path:
    """A directory below ``$XDG_CACHE_HOME/ringtrain``, or ``~/.cache/ringtrain``; it may not be there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().joinpath("ringtrain", *names)
