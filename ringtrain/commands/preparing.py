"""Prepare a rank: settings from flags or from a run, devices, TensorFlow, workload."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from ringtrain.commands.help import PROGRAM
from ringtrain.commands.parser import parse_arguments
from ringtrain.config import Config, make_config
from ringtrain.errors import UsageError
from ringtrain.files.bounded import open_regular
from ringtrain.run.directory import CONFIG_FILE, FIT_OF
from ringtrain.run.store import BEST
from ringtrain.runtime.devices import open_device, start_tensorflow
from ringtrain.runtime.world import World
from ringtrain.terminal.startup import quiet_start
from ringtrain.training.joining import Prepared, adapt, pin
from ringtrain.workloads import BUILT_IN, check_workload_name, create_workload, is_file_within, load_workload
from ringtrain.workloads.base import Workload


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    config: Path | None = None
    """YAML file of these settings; flags behind it win over it"""


def check_settings(explicit: Mapping[str, Any]) -> Config:
    """Check settings before TensorFlow starts; a user-defined workload's partly, since its import may start it."""
    spec = explicit.get("workload", Config.workload)
    check_workload_name(spec)
    return complete(explicit)[1] if spec in BUILT_IN else make_config(explicit, {})


def complete(explicit: Mapping[str, Any]) -> tuple[type[Workload], Config]:
    workload_class = load_workload(explicit.get("workload", Config.workload))
    return workload_class, make_config(explicit, workload_class.defaults, workload_class.options)


def prepare(explicit: Mapping[str, Any], world: World) -> Prepared:
    config = check_settings(explicit)
    plan = pin(world, config)
    with quiet_start():
        workload_class, config = complete(explicit)
        plan = adapt(plan, world, config, workload_class)
        device = start_tensorflow(plan, world)
        open_device(device, world)
    return Prepared(create_workload(workload_class, config.options), config, plan, device)


@dataclass(frozen=True)
class RunOptions:
    run: Path
    """directory of the run"""

    _: KW_ONLY

    checkpoint: str = BEST
    """best, newest, or a name such as step-000001000"""

    workload: str | None = None
    """the run's workload, as in training, if it is your own code (the run's, if built in)"""

    data_dir: Path | None = None
    """directory of the workload's data, if it has moved"""


def read_settings(command: str, options: RunOptions, arguments: Sequence[str], world: World) -> dict[str, Any]:
    """Import code only if the user names it: a run directory may be untrusted."""
    run = options.run
    try:
        open_regular(run / CONFIG_FILE).close()
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        why = f"it holds no {CONFIG_FILE}" if is_missing else error.strerror
        raise UsageError(f"{str(run)!r} is no run directory: {why}. Give the directory of a run.") from None
    explicit = parse_arguments(Settings, ["--config", str(run / CONFIG_FILE)], world)
    spec = explicit["workload"] = options.workload or explicit.get("workload", Config.workload)
    if options.data_dir:
        explicit["data_dir"] = options.data_dir
    if spec in BUILT_IN:
        return explicit
    if spec.startswith(FIT_OF):
        raise UsageError(
            f"{str(run)!r} is a {spec}, kept by callbacks.Run, and {command} is for runs of workloads. Start the "
            "script again: where the run is complete, fit() returns at once, and the model has its weights."
        )
    if is_file_within(spec, run):
        raise UsageError(
            f"the workload {spec!r} is Python code in the run directory itself, which may come from anybody: {command} "
            "does not run it. If you trust it, copy it to another directory and name the copy with --workload."
        )
    if options.workload is None:
        typed = shlex.join([*PROGRAM.split(), command, *arguments, "--workload", spec])
        raise UsageError(
            f"the run's {CONFIG_FILE} names the workload {spec!r}: Python code, which {command} would run. A run "
            f"directory may come from anybody, so the command has to name it. If you trust it: {typed}"
        )
    return explicit


def refuse_launcher(command: str, world: World) -> None:
    if world.size > 1:
        raise UsageError(f"{command} is one process, but {world.launcher} started {world.size}. Use no launcher.")
