"""The command line: ``python -m ringtrain [COMMAND] [FLAGS]``. Without a command it trains."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ringtrain.commands.help import show_overview
from ringtrain.errors import RingtrainError, UsageError
from ringtrain.messages.defects import explaining_import
from ringtrain.messages.escaping import escape_message
from ringtrain.messages.removed import COMMANDS as REMOVED_COMMANDS
from ringtrain.messages.rules import did_you_mean
from ringtrain.runtime.stdio import has_lost_stdout
from ringtrain.runtime.world import World, read_world
from ringtrain.training.ending import report_end

# Imported when called.
COMMANDS = {
    name: f"ringtrain.commands.{name}"
    for name in (
        "train", "launch", "eval", "report", "track", "export", "verify", "workloads", "init", "convert",
        "doctor", "bench",
    )
}  # fmt: skip
# Started by other commands only.
INTERNAL_COMMANDS = {"_record": "ringtrain.commands.record", "_audit": "ringtrain.commands.audit"}


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(start_command, sys.argv[1:] if argv is None else argv, program="ringtrain")


def run_command(command: Callable[[list[str], World], int], arguments: Sequence[str], *, program: str) -> int:
    """Run a command in this process and return its exit code; an error of the user is one line.

    Args:
        command: takes the arguments and this process.
        arguments: of the command line, without the program.
        program: for the message after Ctrl-C.
    """
    try:
        world = read_world(os.environ)
    except RingtrainError as error:
        print(escape_message(f"ringtrain: {error}"), file=sys.stderr)
        return error.exit_code
    try:
        return command(list(arguments), world)
    except RingtrainError as error:
        report_end(error, world)
        return error.exit_code
    except KeyboardInterrupt:  # commands that have nothing to save
        if world.is_rank0:
            print(f"{program}: interrupted (SIGINT).", file=sys.stderr)
        return 128 + signal.SIGINT


def start_command(arguments: list[str], world: World) -> int:
    """Run the command that the first argument names; ``train`` without one."""
    if arguments in (["-h"], ["--help"]):
        if world.is_rank0:
            print(show_overview(COMMANDS), end="")
        return 0
    is_named = bool(arguments) and not arguments[0].startswith("-")
    name = arguments.pop(0) if is_named else "train"
    code: int = load_command(name).main(arguments, world)
    # Training leaves a run directory; other commands only their output.
    is_output_lost = code == 0 and name != "train" and has_lost_stdout()
    return RingtrainError.exit_code if is_output_lost else code


def load_command(command: str) -> Any:
    module = (COMMANDS | INTERNAL_COMMANDS).get(command)
    if command in REMOVED_COMMANDS:
        raise UsageError(f"the command {command!r} was removed. {REMOVED_COMMANDS[command]}")
    if module is None:
        is_file = command.endswith(".py")
        suggestion = f"Did you mean --workload {command}? " if is_file else did_you_mean(command, COMMANDS)
        raise UsageError(f"there is no command {command!r}. {suggestion}Commands: {', '.join(COMMANDS)}.")
    with explaining_import(command):
        return importlib.import_module(module)
