"""Checks of output files before a command replaces them."""

from __future__ import annotations

import stat
from pathlib import Path

from ringtrain.errors import UsageError
from ringtrain.files.bounded import open_regular

HEAD_BYTES = 65536


def require_same_kind(path: Path, mark: bytes, *, kind: str, option: str = "output") -> None:
    """Raise UsageError unless no file has this name, or a regular file that is empty or of the same kind.

    Links, devices, pipes and directories are never replaced.

    Args:
        mark: what the first ``HEAD_BYTES`` bytes of every such file contain.
        kind: the kind of file, for the message, such as ``"a report of ringtrain"``.
        option: the option that gives the path.
    """
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # nothing has this name; if it cannot be written either, that is reported when it is tried
    try:
        with open_regular(path) as file:
            head = file.read(HEAD_BYTES)
            is_same = stat.S_ISREG(mode) and (mark in head or not head)
    except OSError:  # it cannot be read, or is no regular file
        is_same = False
    if not is_same:
        raise UsageError(
            f"{option} is {str(path)!r}, which exists and is not {kind}; it is left unchanged. Give another path, or "
            "remove it."
        )
