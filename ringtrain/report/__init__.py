"""``ringtrain report``: what happened in one run or several, as one HTML file that needs no network.

It reads what a run directory holds, starts no TensorFlow, and runs nothing that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ringtrain.errors import UsageError
from ringtrain.files.atomic import replace_text
from ringtrain.report.page import make_page
from ringtrain.report.reading import read_run


def write_report(runs: Sequence[Path], target: Path, *, may_write: Callable[[], None] = lambda: None) -> None:
    """Write the report of runs to a file, which is there whole or not at all.

    ``may_write`` is called just before the file becomes visible, and raises where another process has taken over. What
    cannot be read is a UsageError, what cannot be written an OSError.
    """
    try:
        page = make_page([read_run(run) for run in runs])
    except OSError as error:
        raise UsageError(
            f"{str(error.filename)!r} cannot be read: {error.strerror}. Check the file and its permissions."
        ) from error
    replace_text(target, page, may_write=may_write)
