"""One process of a run of ``verify``, which starts it.

It is not for the user.

    python -m ringtrain _record --record_to DIRECTORY --record_as other
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import Settings, prepare
from ringtrain.runtime.world import World
from ringtrain.training.joining import joined
from ringtrain.verify.world_sizes import choose_steps


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    record_to: Path
    """empty directory for the records"""

    record_as: Literal["reference", "other", "oracle"]
    """what the run is compared with: nothing, the reference, or one process of ringtrain (it trains in plain Keras)"""


def main(arguments: Sequence[str], world: World) -> int:
    explicit = parse_arguments(Options, arguments, world)
    directory, role = explicit.pop("record_to"), explicit.pop("record_as")
    prepared = prepare(explicit, world)
    config = prepared.config
    if not {"steps", "epochs"} & set(explicit):
        config = dataclasses.replace(config, steps=choose_steps(prepared.workload.defaults), epochs=None)
    with joined(prepared, world, command="record") as (collective, _):
        if role == "oracle":
            from ringtrain.verify.oracle import record_with_oracle

            record_with_oracle(prepared.workload, config, collective, directory)
        else:
            from ringtrain.verify.record import record

            record(prepared.workload, config, collective, directory, is_reference=role == "reference")
    return 0
