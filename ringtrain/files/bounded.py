"""Files that anybody may have written: read up to a limit of size and depth, and never waited for."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

PLAIN = (str, int, float, type(None))  # a bool is an int
MAX_DEPTH = 32
MAX_RECORD_BYTES = 4096


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file to read it. A pipe, which could be waited for without end, a device or a directory is an OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "it is no regular file", str(path))
    return open(descriptor, "rb")


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """A file's bytes; an OSError where it is missing, no regular file, or larger than ``max_bytes``."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it holds more than the {max_bytes:,} bytes that such a file may have", str(path))
    return data


def parse_json(data: bytes) -> Any:
    """What JSON says; a ValueError where it is none, or something to choke on (see ``require_plain``)."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    require_plain(value)
    return value


def read_small(path: Path) -> dict[str, Any]:
    """The object of a small JSON file; empty where there is none."""
    try:
        value = parse_json(read_bounded(path, MAX_RECORD_BYTES))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def require_plain(value: Any, *, max_values: int = 10_000_000) -> None:
    """See that a value is of plain types, such as JSON has, and small once all that it refers to is written out."""
    count, level = 0, [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                if not all(isinstance(key, str) for key in item):
                    raise ValueError("a key is no text")
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif not isinstance(item, PLAIN):
                raise ValueError(f"a value is a {type(item).__name__}")
            if len(below) > max_values - count:
                raise ValueError(f"it has more than {max_values:,} values")
        if not below:
            return
        count, level = count + len(below), below
    raise ValueError("it is nested too deep")
