"""The log of a run, whose lines rank 0 shows."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

# Not registered, so that no logging configuration disables it or duplicates its lines.
LOG = logging.Logger("ringtrain", logging.INFO)
LOG.addHandler(logging.NullHandler())  # shown only within ``show_log``


class _Lines(logging.Handler):
    def __init__(self, print_line: Callable[[str], None]) -> None:
        super().__init__()
        self._print_line = print_line

    def emit(self, record: logging.LogRecord) -> None:
        kind = "warning: " if record.levelno >= logging.WARNING else ""
        self._print_line(f"{kind}{record.getMessage()}")


@contextlib.contextmanager
def show_log(print_line: Callable[[str], None]) -> Iterator[None]:
    """Within it, pass the lines to a function: on rank 0 one that prints, on others one that does nothing."""
    handler = _Lines(print_line)
    LOG.addHandler(handler)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
