"""Paths in messages of the benchmarks, and errors while they write a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ringtrain.errors import UsageError
from ringtrain.messages.rules import shorten

LONGEST_PATH = 500


def show_path(path: Path) -> str:
    """Return a path in quotes, for messages; the start of one that no file can have."""
    text = repr(str(path))
    return text if len(text) <= LONGEST_PATH else shorten(text)


@contextlib.contextmanager
def explaining_files(path: Path) -> Iterator[None]:
    """Raise UsageError instead of OSError while ``path`` is written."""
    try:
        yield
    except OSError as error:
        remedy = "Give another place with --output."
        raise UsageError(f"{show_path(path)} cannot be written: {error.strerror}. {remedy}") from error
