"""Safe reading of untrusted files: regular files only, limited in size and depth.

Links are not followed unless the user named the path.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

PLAIN = (str, int, float, type(None))  # including bool
MAX_DEPTH = 32
MAX_RECORD_BYTES = 4096


def open_descriptor(path: Path, flags: int, *, follows_links: bool = False) -> int:
    """Open a regular file with flags of ``os.open``; others raise OSError without blocking."""
    with _explaining_links(path):
        flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW)
        descriptor = os.open(path, flags, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(
            errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, f"{path.name!r} is no regular file", str(path)
        )
    return descriptor


def open_regular(path: Path, *, follows_links: bool = False) -> io.BufferedReader:
    return open(open_descriptor(path, os.O_RDONLY, follows_links=follows_links), "rb")


@contextlib.contextmanager
def open_directory(path: Path) -> Iterator[int]:
    """Yield a descriptor for ``dir_fd``. Links raise OSError."""
    with _explaining_links(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Raise OSError for links or a missing parent."""
    with _explaining_links(path):
        path.mkdir(exist_ok=True)
    with open_directory(path):
        pass


@contextlib.contextmanager
def _explaining_links(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST) and path.is_symlink():
            raise OSError(errno.ELOOP, f"{path.name!r} is a link, which is not followed", str(path)) from None
        raise


def read_bounded(path: Path, max_bytes: int, *, follows_links: bool = False) -> bytes:
    """Raise OSError if larger, or as ``open_descriptor``."""
    with open_regular(path, follows_links=follows_links) as file:
        require_at_most(file, max_bytes, path)
        return file.read(max_bytes)


def require_at_most(file: io.BufferedReader, max_bytes: int, path: Path) -> None:
    """Raise OSError if larger, for example a sparse file."""
    if os.fstat(file.fileno()).st_size > max_bytes:
        raise OSError(errno.EFBIG, f"{path.name!r} has more than {max_bytes:,} bytes", str(path))


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class LimitedReader:
    """A stream, such as an unpacked archive, that raises OSError after ``max_bytes``."""

    def __init__(self, stream: Readable, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._remaining_bytes = max_bytes

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._remaining_bytes -= len(data)
        if self._remaining_bytes < 0:
            raise OSError(errno.EFBIG, f"it unpacks to more than {self._max_bytes:,} bytes")
        return data


def parse_json(data: bytes) -> Any:
    """Raise ValueError, also for excessive content."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    require_plain(value)
    return value


def read_small(path: Path) -> dict[str, Any]:
    """Return a small JSON object; empty if missing or invalid."""
    try:
        value = parse_json(read_bounded(path, MAX_RECORD_BYTES))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def require_plain(value: Any, *, max_values: int = 10_000_000) -> None:
    """Raise ValueError unless a value has plain types, and is small with all references expanded."""
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
