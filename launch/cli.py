"""The command line: ``python -m launch local|slurm [OPTIONS] -- FLAGS OF RINGTRAIN``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from launch.arguments import find_command
from ringtrain.errors import RingtrainError, UsageError
from ringtrain.messages.escaping import escape_message

HELP = """\
usage: python -m launch COMMAND [OPTIONS] -- FLAGS OF RINGTRAIN

commands:
  local   train on this machine, label each rank's lines, start again after a
          crash
  slurm   write an sbatch file, submit it

examples:
  python -m launch local -np 2 -- --workload digits
  python -m launch local -np 4 --max_restarts 3 -- --epochs 50
  python -m launch slurm render --nodes 2 --gpus_per_node 4 -- --epochs 50

Each command's options: python -m launch COMMAND --help
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
    from launch.local import main

    return main(arguments)


def slurm(arguments: Sequence[str]) -> int:
    """Write, submit or follow up a batch job."""
    from launch.slurm.cli import main

    return main(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"local": local, "slurm": slurm}
