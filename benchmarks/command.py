"""The end of a command of the benchmarks, and errors while it writes a file."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ringtrain.errors import RingtrainError, UsageError
from ringtrain.messages.escaping import escape_message
from ringtrain.messages.rules import shorten
from ringtrain.runtime.world import World, read_world
from ringtrain.training.ending import report_end

LONGEST_PATH = 500


def run_command(command: Callable[[Sequence[str], World], int], arguments: Sequence[str]) -> int:
    """Run a command in this process and return its exit code; an error of the user is one line."""
    try:
        world = read_world(os.environ)
    except RingtrainError as error:
        print(escape_message(f"ringtrain: {error}"), file=sys.stderr)
        return error.exit_code
    try:
        return command(arguments, world)
    except RingtrainError as error:
        report_end(error, world)
        return error.exit_code
    except KeyboardInterrupt:
        print("benchmarks: interrupted (SIGINT).", file=sys.stderr)
        return 128 + signal.SIGINT


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
