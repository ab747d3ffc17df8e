"""Atomic files: written under another name, flushed to the disk, renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

WRITING = ".writing-"  # with this begin the names of files that are not complete yet


@contextlib.contextmanager
def replacing(target: Path, *, may_write: Callable[[], None] = lambda: None) -> Iterator[BinaryIO]:
    """A file to write that replaces ``target`` at the end of this context, and is removed after an error.

    ``may_write`` is called just before it becomes visible, and raises where another process has taken over. A target
    that is no regular file, such as a link, is an OSError: it is not replaced.
    """
    aside = target.with_name(f"{WRITING}{secrets.token_hex(8)}-{target.name}")
    try:
        with aside.open("xb") as file:  # never through a link that another user put there
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
    """Raise OSError if something else than a regular file has this name."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(target.lstat().st_mode):
            raise OSError(errno.EEXIST, f"{target.name!r} is no regular file, and is not replaced", str(target))


def replace_text(target: Path, text: str, *, may_write: Callable[[], None] = lambda: None) -> None:
    """Write a text in UTF-8, as ``replacing`` does; what is no character, such as half of one, becomes a ``?``."""
    with replacing(target, may_write=may_write) as file:
        file.write(text.encode("utf-8", errors="replace"))


def flush(descriptor: int) -> None:
    """Bring a file, or the names in a directory, to the disk."""
    os.fsync(descriptor)


def flush_directory(path: Path) -> None:
    """Bring the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)
