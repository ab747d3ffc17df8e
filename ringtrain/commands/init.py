"""Write a workload template that is ready to train.

It is a file of forty lines, and trains on synthetic data.

    python -m ringtrain init my_workload.py
    horovodrun -np 2 python -m ringtrain --workload my_workload.py
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringtrain.commands.help import PROGRAM
from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import refuse_launcher
from ringtrain.errors import UsageError
from ringtrain.messages.escaping import escape
from ringtrain.messages.rules import printable
from ringtrain.runtime.world import World
from ringtrain.workloads import refuse_hiding

TEMPLATE = Path(__file__).parent / "my_workload.txt"
TEMPLATE_NAME = "my_workload.py"


@dataclass(frozen=True)
class Options:
    file: Path
    """Python file to write; it must not exist"""

    def __post_init__(self) -> None:
        printable("file", self.file)


def main(arguments: Sequence[str], world: World) -> int:
    path = Options(**parse_arguments(Options, arguments, world)).file
    refuse_launcher("init", world)
    write_starting_file(path)
    print(escape(f"{path}: a model, its data and its loss, for you to change. Train it:"))
    print(escape(f"  horovodrun -np 2 {PROGRAM} --workload {shlex.quote(str(path))}"))
    return 0


def write_starting_file(path: Path) -> None:
    """Atomic; never overwrites."""
    if path.suffix != ".py":
        raise UsageError(f"file is {str(path)!r}; it must end in .py, such as {TEMPLATE_NAME}.")
    refuse_hiding(path, is_new=True)
    text = TEMPLATE.read_text(encoding="utf-8").replace(TEMPLATE_NAME, path.name)
    try:
        with tempfile.TemporaryDirectory(prefix=".ringtrain-", dir=path.parent) as directory:
            temporary = Path(directory) / path.name
            temporary.write_text(text, encoding="utf-8")
            os.link(temporary, path)  # fails if it exists
    except FileExistsError:
        raise UsageError(
            f"{str(path)!r} exists already, and is not changed. Give another name, or remove it."
        ) from None
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror}. Give another path.") from error
