"""The run that a command was given: its checkpoint, its settings, and of code only what the user names."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from ringtrain.commands.help import PROGRAM
from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import Settings
from ringtrain.config import Config
from ringtrain.errors import UsageError
from ringtrain.run.directory import CONFIG_FILE
from ringtrain.run.store import BEST
from ringtrain.runtime.world import World
from ringtrain.workloads import BUILT_IN, is_file_within


@dataclass(frozen=True)
class RunOptions:
    """What every command takes that looks into a run."""

    run: Path
    """directory of the run"""

    _: KW_ONLY

    checkpoint: str = BEST
    """best, newest, or a name such as step-000001000"""

    workload: str | None = None
    """the run's workload, as in training, where it is code of your own (the run's, where built in)"""

    data_dir: Path | None = None
    """directory of the workload's data, where it has moved"""


def read_settings(command: str, options: RunOptions, arguments: Sequence[str], world: World) -> dict[str, Any]:
    """The settings of a run that a command was given; of code, only what the user names.

    A run directory may be a stranger's, and importing the file that its configuration names would run it.
    """
    run = options.run
    if not os.path.isfile(run / CONFIG_FILE):
        raise UsageError(f"{str(run)!r} is no run directory: it holds no {CONFIG_FILE}. Give the directory of a run.")
    explicit = parse_arguments(Settings, ["--config", str(run / CONFIG_FILE)], world)
    spec = explicit["workload"] = options.workload or explicit.get("workload", Config.workload)
    if options.data_dir:
        explicit["data_dir"] = options.data_dir
    if spec in BUILT_IN:
        return explicit
    if is_file_within(spec, run):
        raise UsageError(
            f"the workload {spec!r} is Python code in the run directory itself, which may come from anybody: {command} "
            "does not run it. Where you trust it, copy it to another directory and name the copy with --workload."
        )
    if options.workload is None:
        typed = shlex.join([*PROGRAM.split(), command, *arguments, "--workload", spec])
        raise UsageError(
            f"the run's {CONFIG_FILE} names the workload {spec!r}: Python code, which {command} would run. A run "
            f"directory may come from anybody, so the command has to name it. Where you trust it: {typed}"
        )
    return explicit
