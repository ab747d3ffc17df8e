"""The command line: ``python -m launch local|slurm [OPTIONS] -- FLAGS OF RINGTRAIN``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ringtrain.errors import RingtrainError, UsageError
from ringtrain.messages.escaping import escape_message

from . import PROGRAM
from .arguments import find_command

HELP = f"""\
usage: {PROGRAM} COMMAND [OPTIONS] -- FLAGS OF RINGTRAIN

commands:
  local   train on this machine, label each rank's lines, start again after a
          crash
  slurm   write an sbatch file, submit it

examples:
  {PROGRAM} local -np 2 -- --workload digits
  {PROGRAM} local -np 4 --max_restarts 3 -- --epochs 50
  {PROGRAM} slurm render --nodes 2 --gpus_per_node 4

Each command's options: {PROGRAM} COMMAND --help
"""


def main(argv: Sequence[str]) -> int:
    """Run a command and return its exit code (see ``ringtrain.errors``)."""
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print(HELP, end="")
            return 0 if argv else UsageError.exit_code
        return find_command(argv[0], COMMANDS)(argv[1:])
    except RingtrainError as error:
        print(escape_message(f"launch: error: {error}"), file=sys.stderr)
        return error.exit_code


def local(arguments: Sequence[str]) -> int:
    """Train on this machine."""
    from .local import main

    return main(arguments)


def slurm(arguments: Sequence[str]) -> int:
    """Write, submit or follow up a batch job."""
    from .slurm.cli import main

    return main(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"local": local, "slurm": slurm}
