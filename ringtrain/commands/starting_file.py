"""``ringtrain init``: a workload of the user's own to begin with."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ringtrain.errors import UsageError
from ringtrain.workloads import refuse_hiding

TEMPLATE = Path(__file__).parent / "my_workload.txt"
TEMPLATE_NAME = "my_workload.py"


def write_starting_file(path: Path) -> None:
    """Write a workload that trains at once, whole or not at all, and never over something.

    Raises:
        UsageError: the path is not that of a new Python file, or it cannot be written.
    """
    if path.suffix != ".py":
        raise UsageError(f"file is {str(path)!r}; it must end in .py, such as {TEMPLATE_NAME}.", reach="run")
    refuse_hiding(path)
    text = TEMPLATE.read_text(encoding="utf-8").replace(TEMPLATE_NAME, path.name)
    try:
        with tempfile.TemporaryDirectory(prefix=".ringtrain-", dir=path.parent) as directory:
            temporary = Path(directory) / path.name
            temporary.write_text(text, encoding="utf-8")
            os.link(temporary, path)  # fails where something has the name
    except FileExistsError:
        raise UsageError(
            f"{str(path)!r} is there already, and is left as it is. Give another name, or remove it.", reach="run"
        ) from None
    except OSError as error:
        raise UsageError(
            f"{str(path)!r} cannot be written: {error.strerror}. Give another path.", reach="run"
        ) from error
