"""``ringtrain.train``: a run from a user's own script, which a launcher starts like ``python -m ringtrain``."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from ringtrain.commands.parser import parse_mapping
from ringtrain.config import Config, make_config, to_plain
from ringtrain.errors import RingtrainError, UsageError
from ringtrain.messages.escaping import escape_message
from ringtrain.messages.rules import merge_options
from ringtrain.runtime.devices import DevicePlan, open_device, start_tensorflow
from ringtrain.runtime.shutdown import note_exit_code, watch_end
from ringtrain.runtime.stdio import keep_streams
from ringtrain.runtime.world import World, read_world
from ringtrain.terminal.startup import quiet_start
from ringtrain.training.connection import kept_connection
from ringtrain.training.ending import report_end
from ringtrain.training.joining import Prepared, pin
from ringtrain.training.together import prepare_and_train
from ringtrain.workloads import create_workload

if TYPE_CHECKING:
    from ringtrain.training.loop import Result
    from ringtrain.workloads.base import Workload


def train(workload: Workload | type[Workload], config: Config | Mapping[str, Any] | None = None) -> Result | None:
    """Train a workload with all ranks that the launcher started; a script's counterpart to ``python -m ringtrain``.

        if __name__ == "__main__":
            result = ringtrain.train(Moons, {"epochs": 5, "optimizer": {"lr": 0.02}})

    Every rank must call this with the same arguments, the first time before TensorFlow computes anything. Stop
    requests, resuming, run directory and exit codes are the command line's; if the run fails or stops early, the script
    exits with one line and the exit code (``SystemExit``). Several calls train one run after the other, each with its
    own ``out``, such as for cross-validation; a script that catches ``SystemExit`` can go on after a failed run.

    Args:
        workload: a workload, or its class.
        config: settings by their command line names, over the workload's defaults; or a whole ``Config``.

    Returns:
        End of the run and last evaluation, the same on every rank; None if the run was already complete.
    """
    try:
        world = read_world(os.environ)
    except RingtrainError as error:
        print(escape_message(f"ringtrain: {error}"), file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    keep_streams()
    note_exit_code(0)  # an earlier run may have failed
    try:
        return prepare_and_train(
            lambda: prepare_on_all_ranks(workload, config or {}, world), world, keeps_connection=True
        )
    except RingtrainError as error:
        report_end(error, world)
        note_exit_code(error.exit_code)
        raise SystemExit(error.exit_code) from error
    finally:
        watch_end(has_left_ranks=True)


def prepare_on_all_ranks(
    workload: Workload | type[Workload], settings: Config | Mapping[str, Any], world: World
) -> Prepared:
    """Prepare; if earlier runs have connected the ranks, raise the error of any rank on all. Collective then."""
    kept = kept_connection()
    if kept is None:
        return prepare(workload, settings, world)
    from ringtrain.collectives import raise_on_all_ranks

    try:
        return raise_on_all_ranks(kept.collective, lambda: prepare(workload, settings, world), name="prepare")
    except RingtrainError as error:
        error.is_agreed = True
        kept.note_end(error.exit_code)
        raise


def prepare(workload: Workload | type[Workload], settings: Config | Mapping[str, Any], world: World) -> Prepared:
    from ringtrain.workloads.base import Workload

    workload_class = workload if isinstance(workload, type) else type(workload)
    if not issubclass(workload_class, Workload):
        raise UsageError(f"ringtrain.train got {workload!r}; it must be a ringtrain.Workload, or its class.")
    config = choose_config(workload_class, settings)
    if isinstance(workload, Workload) and config.options != workload.options:
        raise UsageError(
            "ringtrain.train got a workload that is made already, and options for it, which it would not follow. Give "
            f"its class: ringtrain.train({workload_class.__name__}, ...)."
        )
    instance = workload if isinstance(workload, Workload) else create_workload(workload_class, config.options)
    plan, device = take_devices_once(config, world, workload_class)
    return Prepared(instance, config, plan, device)


class Devices(NamedTuple):
    """Devices of this process, which all its runs use."""

    plan: DevicePlan
    name: str
    is_deterministic: bool


_devices: Devices | None = None


def take_devices_once(config: Config, world: World, workload_class: type[Workload]) -> tuple[DevicePlan, str]:
    """Return plan and name of this process's devices; TensorFlow cannot change them after the first run.

    A later run gets the names of layers that it would get in its own process, so that another process can resume it.
    """
    global _devices
    if _devices is None:
        plan = pin(world, config, workload_class)
        device = start_devices(plan, world)
        _devices = Devices(plan, device, config.deterministic)
        return plan, device
    if config.deterministic and not _devices.is_deterministic and world.size > 1:
        raise UsageError(
            "deterministic is true, but the first run of this process was not deterministic, and the settings of the "
            "communication cannot be changed any more. Set deterministic for the first run, too, or use a process for "
            "each run."
        )
    import keras

    keras.utils.clear_session(free_memory=False)
    return _devices.plan, _devices.name


def start_devices(plan: DevicePlan, world: World) -> str:
    """Start TensorFlow; return the device's name."""
    try:
        with quiet_start():
            device = start_tensorflow(plan, world)
    except RuntimeError as error:
        raise UsageError(
            f"ringtrain.train was called when TensorFlow had computed something already ({error}), so that this rank "
            "can be given neither its own GPU nor its own cores. Call it first; what makes tensors belongs into the "
            "methods of the workload."
        ) from error
    open_device(device, world)
    return device


def choose_config(workload_class: type[Workload], settings: Config | Mapping[str, Any]) -> Config:
    name = name_of(workload_class)
    if isinstance(settings, Config):
        options = merge_options(settings.options, workload_class.options)
        return dataclasses.replace(settings, workload=name, options=options)
    try:
        plain = yaml.safe_load(yaml.safe_dump(to_plain(settings)))
    except yaml.YAMLError as error:
        raise UsageError(
            f"the settings of ringtrain.train hold what is no plain value: {error}. Give numbers, texts, paths, "
            "true or false."
        ) from error
    explicit = parse_mapping(Config, plain)
    return make_config({**explicit, "workload": name}, workload_class.defaults, workload_class.options)


def name_of(workload_class: type[Workload]) -> str:
    """``--workload`` for ``ringtrain eval``: file.py:Class or module:Class."""
    module = sys.modules.get(workload_class.__module__)
    file = getattr(module, "__file__", None)
    place = file if workload_class.__module__ == "__main__" and file else workload_class.__module__
    return f"{place}:{workload_class.__name__}"
