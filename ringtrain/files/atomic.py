"""Atomic writes: temporary name, fsync, rename."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

WRITING = ".writing-"  # prefix of incomplete files


@contextlib.contextmanager
def replacing(target: Path, *, may_write: Callable[[], None] = lambda: None) -> Iterator[BinaryIO]:
    """Yield a file that replaces ``target`` on success, and is removed on error.

    ``may_write``, called just before the rename, raises if another process has taken over. Other targets than regular
    files, such as links, raise OSError.
    """
    aside = target.with_name(f"{WRITING}{secrets.token_hex(8)}-{target.name}")
    try:
        with aside.open("xb") as file:  # never through another user's link
            yield file
            file.flush()
            flush(file.fileno())
        may_write()
        require_regular(target)
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def require_regular(target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(target.lstat().st_mode):
            raise OSError(errno.EEXIST, f"{target.name!r} is no regular file, and is not replaced", str(target))


def replace_text(target: Path, text: str, *, may_write: Callable[[], None] = lambda: None) -> None:
    """Encode as UTF-8; surrogates become ``?``."""
    with replacing(target, may_write=may_write) as file:
        file.write(text.encode("utf-8", errors="replace"))


def flush(descriptor: int) -> None:
    os.fsync(descriptor)


def flush_directory(path: Path) -> None:
    """Make renames durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)
