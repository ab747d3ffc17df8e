"""File formats: CIFAR-10, image folders, TFRecord files with their index, and their conversion."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ringtrain.errors import DataError


def file_error(message: str) -> DataError:
    """An error that all ranks of a node meet, since they look at the same files."""
    return DataError(message, reach="node")


@contextlib.contextmanager
def reading(path: str | Path, *, what: str = "the file") -> Iterator[None]:
    """An error that names a file that cannot be read, and the remedy."""
    try:
        yield
    except OSError as error:
        raise file_error(
            f"{path} cannot be read: {error.strerror or error}. Check {what} and its permissions."
        ) from error
