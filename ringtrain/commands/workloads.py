"""List the built-in workloads, with what they train on.

The table has the model, the data, the batch size, the length and the number of parameters of each.

    python -m ringtrain workloads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringtrain.commands.parser import parse_arguments
from ringtrain.runtime.world import World
from ringtrain.workloads.listing import list_workloads


@dataclass(frozen=True)
class Options:
    """It takes none."""


def main(arguments: Sequence[str], world: World) -> int:
    """Print the table."""
    parse_arguments(Options, arguments, world)
    if world.is_rank0:
        print(list_workloads())
    return 0
