"""``ringtrain report``: runs as one offline HTML file.

Reads run directories without TensorFlow, and never executes their contents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ringtrain.errors import UsageError
from ringtrain.files.atomic import replace_text
from ringtrain.files.outputs import require_same_kind
from ringtrain.report.page import make_page
from ringtrain.report.reading import read_run

MARK = b'<meta name="generator" content="ringtrain '  # near the begin of each report


def write_report(
    runs: Sequence[Path],
    target: Path,
    *,
    may_write: Callable[[], None] = lambda: None,
) -> None:
    """Atomic; ``may_write`` precedes the rename.

    Raises:
        UsageError: a run cannot be read, or the target is a file of another kind.
        OSError: the target cannot be written.
    """
    require_same_kind(target, MARK, kind="a report of ringtrain")
    try:
        page = make_page([read_run(run) for run in runs])
    except OSError as error:
        raise UsageError(
            f"{str(error.filename)!r} cannot be read: {error.strerror}. Check the file and its permissions."
        ) from error
    replace_text(target, page, may_write=may_write)
