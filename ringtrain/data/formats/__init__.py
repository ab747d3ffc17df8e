"""File formats: CIFAR-10, image folders and TFRecord files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ringtrain.errors import DataError


def file_error(message: str) -> DataError:
    """For all ranks of a node, which share the files."""
    return DataError(message, reach="node")


@contextlib.contextmanager
def reading(path: str | Path, *, what: str = "the file") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise file_error(
            f"{path} cannot be read: {error.strerror or error}. Check {what} and its permissions."
        ) from error
