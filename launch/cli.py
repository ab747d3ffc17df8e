"""The command line: ``python -m launch local|slurm [OPTIONS] -- FLAGS | SCRIPT.py``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ringtrain.errors import RingtrainError
from ringtrain.messages.defects import explaining_import
from ringtrain.messages.escaping import escape_message

from . import PROGRAM
from .arguments import run_command

HELP = f"""\
usage: {PROGRAM} COMMAND [OPTIONS] -- FLAGS | SCRIPT.py

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
    try:
        return run_command(argv, COMMANDS, HELP)
    except RingtrainError as error:
        print(escape_message(f"launch: error: {error}"), file=sys.stderr)
        return error.exit_code


def local(arguments: Sequence[str]) -> int:
    with explaining_import("launch local"):
        from .local import main

    return main(arguments)


def slurm(arguments: Sequence[str]) -> int:
    with explaining_import("launch slurm"):
        from .slurm.cli import main

    return main(arguments)


COMMANDS = {"local": local, "slurm": slurm}
