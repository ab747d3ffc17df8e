"""Export the model of a run for use without ringtrain.

It has the weights that an evaluation uses. One process.

    python -m ringtrain export runs/digits
    python -m ringtrain export runs/digits --format saved_model --output digits
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import RunOptions, prepare, read_settings, refuse_launcher
from ringtrain.errors import UsageError
from ringtrain.messages.escaping import escape
from ringtrain.messages.rules import printable
from ringtrain.run.directory import refuse_taken, require_own, require_writable
from ringtrain.run.store import BEST, find_checkpoint
from ringtrain.runtime.world import World


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    format: Literal["keras", "saved_model"] = "keras"
    """keras: a .keras file, for keras.saving.load_model; saved_model: a directory, for tf.saved_model.load and
    TensorFlow Serving"""

    output: Path | None = None
    """what to write; it must not exist (RUN/export/step-NUMBER)"""

    def __post_init__(self) -> None:
        printable("output", self.output)


def main(arguments: Sequence[str], world: World) -> int:
    options = Options(**parse_arguments(Options, arguments, world))
    refuse_launcher("export", world)
    explicit = read_settings("export", options, arguments, world)
    if not os.path.isdir(explicit.get("data_dir", "")) and not options.data_dir:
        explicit.pop("data_dir", None)  # a directory that has gone is not needed
    checkpoint = require_own(options.run, find_checkpoint(options.run, options.checkpoint))
    ending = ".keras" if options.format == "keras" else ""
    name = checkpoint.resolve().name.removeprefix(f"{BEST}-") + ending
    output = options.output or options.run / "export" / name
    if ending and output.suffix != ending:
        raise UsageError(f"output is {str(output)!r}; with --format keras it must end in .keras.")
    refuse_taken(output)
    if options.output is None:
        require_writable(output.parent)
    prepared = prepare(explicit, world)
    from ringtrain.export import export

    for line in export(prepared.workload, prepared.config, checkpoint, output, options.format):
        print(escape(line))
    return 0
