"""Train a Keras model on many GPUs or cores, one process each.

The same command again resumes where a run ended. Defaults are in brackets; a workload's own win over them
(--print_config shows those of a run).

    horovodrun -np 2 python -m ringtrain
    horovodrun -np 2 python -m ringtrain --workload my_workload.py --epochs 5
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import Settings, check_settings, complete, prepare
from ringtrain.config import to_plain
from ringtrain.errors import RingtrainError
from ringtrain.runtime.stdio import has_lost_stdout
from ringtrain.runtime.world import World
from ringtrain.training.together import prepare_and_train


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    print_config: bool = False
    """print the settings of the run as YAML, and leave"""


def main(arguments: Sequence[str], world: World) -> int:
    explicit = parse_arguments(Options, arguments, world)
    if explicit.pop("print_config", False):
        check_settings(explicit)
        _, config = complete(explicit)
        if world.is_rank0:
            yaml.safe_dump(to_plain(dataclasses.asdict(config)), sys.stdout, sort_keys=False)
        return RingtrainError.exit_code if has_lost_stdout() else 0
    prepare_and_train(lambda: prepare(explicit, world), world)
    return 0
