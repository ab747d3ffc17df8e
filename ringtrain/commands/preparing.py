"""From settings to a rank that has its devices, and is ready to join the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtrain.config import Config, make_config
from ringtrain.errors import UsageError
from ringtrain.runtime.devices import start_tensorflow
from ringtrain.runtime.world import World
from ringtrain.terminal.startup import quiet_start
from ringtrain.training.joining import Prepared, adapt, pin
from ringtrain.workloads import BUILT_IN, check_workload_name, create_workload, load_workload
from ringtrain.workloads.base import Workload


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """The settings of a run, as they are given: as flags or in a file."""

    config: Path | None = None
    """YAML file of these settings; flags behind it win over it"""


def check_settings(explicit: Mapping[str, Any]) -> Config:
    """Find a wrong setting before TensorFlow starts.

    A built-in workload's defaults are known without TensorFlow; a user's module may import it and waits.
    """
    spec = explicit.get("workload", Config.workload)
    check_workload_name(spec)
    return complete(explicit)[1] if spec in BUILT_IN else make_config(explicit, {})


def complete(explicit: Mapping[str, Any]) -> tuple[type[Workload], Config]:
    """The workload, which is imported, and with its defaults the whole configuration of the run."""
    workload_class = load_workload(explicit.get("workload", Config.workload))
    return workload_class, make_config(explicit, workload_class.defaults, workload_class.options)


def prepare(explicit: Mapping[str, Any], world: World) -> Prepared:
    """Take this rank's devices, then start TensorFlow and import the workload."""
    config = check_settings(explicit)
    plan = pin(world, config)
    with quiet_start():
        workload_class, config = complete(explicit)
        plan = adapt(plan, world, config, workload_class)
        device = start_tensorflow(plan, world)
    return Prepared(create_workload(workload_class, config.options), config, plan, device)


def refuse_launcher(command: str, world: World) -> None:
    """See that a command that is one process is started as one."""
    if world.size > 1:
        raise UsageError(f"{command} is one process, but {world.launcher} started {world.size}. Use no launcher.")
