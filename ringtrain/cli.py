"""The command line: ``python -m ringtrain [COMMAND] [FLAGS]``. Without a command it trains."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import yaml

from ringtrain import __version__
from ringtrain.config import Config, OptimizerConfig, make_config, to_dict
from ringtrain.devices import (
    DevicePlan,
    apply_plan,
    claim_cores,
    plan_devices,
    read_machine,
    start_tensorflow,
)
from ringtrain.errors import RingtrainError, UsageError
from ringtrain.startup import quiet_start
from ringtrain.workloads import BUILT_IN, check_workload_name, load_workload
from ringtrain.world import World, read_world

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from ringtrain.collectives import Collective
    from ringtrain.workloads.base import Workload


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (see ``ringtrain.errors``)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "train"
    try:
        world = read_world(os.environ)
    except RingtrainError as error:
        print(f"ringtrain: {error}", file=sys.stderr)
        return error.exit_code
    try:
        run_command = COMMANDS.get(command)
        if run_command is None:
            near = difflib.get_close_matches(command, COMMANDS, n=1)
            suggestion = f"Did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"there is no command {command!r}. {suggestion}Commands: {', '.join(COMMANDS)}.", reach="run")
        return run_command(arguments, world)
    except RingtrainError as error:
        report_error(error, world)
        return error.exit_code


def report_error(error: RingtrainError, world: World) -> None:
    """Print an error once, however many processes raise it: one line, written whole."""
    speaks = {"run": world.is_first, "node": world.local_rank == 0, "rank": True}[error.reach]
    if speaks:
        where = f"rank {world.rank} on {world.node}: " if world.size > 1 and error.reach != "run" else ""
        sys.stdout.flush()
        sys.stderr.write(f"ringtrain: error: {where}{error}\n")
        sys.stderr.flush()


def train_command(arguments: Sequence[str], world: World) -> int:
    """Train, from the command line to the last line of the log."""
    explicit = parse_train_arguments(arguments, world)
    wants_config = explicit.pop("print_config", False)
    spec = explicit.get("workload", Config.workload)
    check_workload_name(spec)
    # A built-in workload's defaults are known without TensorFlow, and a wrong setting is found before it starts.
    config = make_config(explicit, load_workload(spec).defaults if spec in BUILT_IN else {})
    if wants_config and spec in BUILT_IN:
        return print_config(config, world)
    plan = pin(world, deterministic=config.deterministic)
    with quiet_start():
        workload_class = load_workload(spec)
        config = make_config(explicit, workload_class.defaults)
        if wants_config:
            return print_config(config, world)
        device = start_tensorflow(plan, world)
    return train_under_launcher(workload_class, config, world, plan, device)


def pin(world: World, *, deterministic: bool) -> DevicePlan:
    """Take this rank's share of its node, before anything heavy is imported."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # the libraries'; ours reach the user as lines of the log
    machine = read_machine(os.environ)
    plan = plan_devices(world, machine, os.environ, deterministic=deterministic, claim_cores=claim_cores)
    apply_plan(plan)
    return plan


def train_under_launcher(
    workload_class: type[Workload], config: Config, world: World, plan: DevicePlan, device: str
) -> int:
    """Join the other ranks and train."""
    from ringtrain.collectives import connect, on_first
    from ringtrain.console import open_console
    from ringtrain.loop import run_path, train
    from ringtrain.run_directory import RunDirectory, create_run_directory
    from ringtrain.startup import describe_start

    collective = connect(config.backend, world)
    with leaving(collective):
        console = open_console(is_first=world.is_first)
        for line in describe_start(collective, plan, device):
            console.line(line)
        wanted, is_exact = run_path(config)
        path = on_first(collective, lambda: str(create_run_directory(wanted, is_exact=is_exact)), name="run_directory")
        run = RunDirectory(Path(path)) if world.is_first else None
        with recording_end(run):
            if run is not None:
                run.write_config(to_dict(config))
            result = train(
                workload_class(), config, collective, run=run, console=console, num_threads=plan.intra_op_threads
            )
        metrics = "".join(f", {name} {value:.4f}" for name, value in result.metrics.items()) if result else ""
        console.line(f"done{metrics}; the run is in {path}")
    return 0


@contextlib.contextmanager
def recording_end(run: Any) -> Iterator[None]:
    """Write the ``end`` record of a run, however it ends."""
    status, exit_code, message = "completed", 0, None
    try:
        yield
    except RingtrainError as error:
        status, exit_code, message = type(error).__name__.removesuffix("Error").lower(), error.exit_code, str(error)
        raise
    except BaseException as error:
        status, exit_code, message = "failed", 1, f"{type(error).__name__}: {error}"
        raise
    finally:
        if run is not None:
            run.write_event("end", status=status, exit_code=exit_code, **({"message": message} if message else {}))
            run.close()


@contextlib.contextmanager
def leaving(collective: Collective) -> Iterator[None]:
    """Leave the other ranks in good order, or at once where this rank failed alone: then they would wait for ever."""
    try:
        yield
    except RingtrainError as error:
        if error.reach == "run":
            collective.close()
            raise
        report_error(error, collective.world)
        collective.abort(error.exit_code)
    except BaseException:
        world = collective.world
        sys.stderr.write(f"ringtrain: error: rank {world.rank} on {world.node} failed:\n{traceback.format_exc()}")
        collective.abort(1)
    else:
        collective.close()


def parse_train_arguments(arguments: Sequence[str], world: World) -> dict[str, Any]:
    """What the user wrote: field names to values of the right types.

    Raises:
        UsageError: an unknown flag or key, a value of the wrong type, a file that cannot be read.
        SystemExit: after ``--help``.
    """
    from argparse import ArgumentError

    parser = create_train_parser()
    if {"-h", "--help"} & set(arguments):
        if world.is_first:
            parser.print_help()
        raise SystemExit(0)
    try:
        explicit = parser.parse_args(list(arguments), defaults=False).as_dict()
    except (ArgumentError, yaml.YAMLError) as error:
        raise UsageError(explain_parse_error(str(error), parser), reach="run") from None
    explicit.pop("config", None)
    return {key: value for key, value in explicit.items() if value is not None}


def create_train_parser() -> ArgumentParser:
    """Flags from the fields of ``Config``, and the same names as keys of a YAML file."""
    from jsonargparse import ActionYesNo, ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog="ringtrain [train]",
        description="Train a Keras model on many GPUs, one process per GPU: horovodrun -np 2 python -m ringtrain",
        exit_on_error=False,
        print_config=None,
        default_meta=False,
    )
    parser.add_argument("--config", action="config", help="YAML file of the settings below; flags win over it")
    parser.add_argument("--print_config", action=ActionYesNo, help="print the settings of the run as YAML, and leave")
    parser.add_class_arguments(OptimizerConfig, "optimizer", help="optimizer")
    parser.add_class_arguments(Config, skip={"optimizer"}, help="settings")
    return parser


def explain_parse_error(message: str, parser: ArgumentParser) -> str:
    """A parser's message as one line: the flag, its value and the rule, or the flag that may have been meant."""
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    unknown = re.search(r"(?:unrecognized arguments: |Key '|Option ')(--)?([\w.]+)", message)
    if unknown:
        near = difflib.get_close_matches(f"--{unknown[2]}", flags, n=1)
        prefix = "--" if unknown[1] else ""
        suggestion = f"Did you mean {prefix}{near[0].removeprefix('--')}? " if near else ""
        return f"there is no {'flag' if prefix else 'key'} {prefix}{unknown[2]}. {suggestion}See --help."
    wrong = re.search(r'Parser key "([\w.]+)".*(?:Given value|Got value): (.*)', message, re.DOTALL)
    if wrong and wrong[1] in field_rules():
        return f"{wrong[1]} is {wrong[2].strip()!r}; it must be {field_rules()[wrong[1]]}."
    return " ".join(message.split())


def field_rules() -> dict[str, str]:
    """What each setting must be, in words, from the types of the configuration's fields."""
    words = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path", str: "a text"}
    rules = {}
    for prefix, settings in (("", Config), ("optimizer.", OptimizerConfig)):
        for name, hint in get_type_hints(settings).items():
            options = [option for option in get_args(hint) if option is not type(None)]
            if options and isinstance(options[0], str):
                rules[prefix + name] = f"one of {', '.join(options)}"
            else:
                rules[prefix + name] = words.get(options[0] if options else hint, "a mapping")
    return rules


def print_config(config: Config, world: World) -> int:
    """Print the configuration as YAML that ``--config`` reads."""
    if world.is_first:
        yaml.safe_dump(to_dict(config), sys.stdout, sort_keys=False)
    return 0


COMMANDS: dict[str, Callable[[Sequence[str], World], int]] = {"train": train_command}
