"""Checks of output files before a command replaces them."""

from __future__ import annotations

import stat
from pathlib import Path

from ringtrain.errors import UsageError
from ringtrain.files.bounded import open_regular

HEAD_BYTES = 65536


def require_same_kind(path: Path, mark: bytes, *, kind: str, option: str = "output") -> None:
    """Raise UsageError unless the path is free, or a regular file that is empty or of the same kind.

    ``mark``: bytes in the first ``HEAD_BYTES`` of such files; ``kind``: such as ``"a report of ringtrain"``.
    """
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # free; write errors are reported later
    try:
        with open_regular(path) as file:
            head = file.read(HEAD_BYTES)
            is_same = stat.S_ISREG(mode) and (mark in head or not head)
    except OSError:  # unreadable, or no regular file
        is_same = False
    if not is_same:
        raise UsageError(
            f"{option} is {str(path)!r}, which exists and is not {kind}; it is left unchanged. Give another path, or "
            "remove it."
        )
