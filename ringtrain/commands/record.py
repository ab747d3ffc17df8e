"""One process of a run of ``verify``, which starts it.

It is not for the user.

    python -m ringtrain _record --record_to DIRECTORY --record_as other
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import Settings, prepare
from ringtrain.runtime.world import World
from ringtrain.training.joining import joined
from ringtrain.verify.world_sizes import choose_steps

if TYPE_CHECKING:
    from ringtrain.workloads.base import Workload


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    record_to: Path
    """empty directory for the records"""

    record_as: Literal["reference", "other", "oracle"]
    """what the run is compared with: nothing, the reference, or one process of ringtrain (it trains in plain Keras)"""

    without_augment: bool = False
    """leave the workload's augment() out"""


def main(arguments: Sequence[str], world: World) -> int:
    explicit = parse_arguments(Options, arguments, world)
    directory, role = explicit.pop("record_to"), explicit.pop("record_as")
    without_augment = explicit.pop("without_augment", False)
    prepared = prepare(explicit, world)
    if without_augment:
        leave_augment_out(prepared.workload)
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


def leave_augment_out(workload: Workload) -> None:
    """Let this instance of a workload have the augment() of the base class, which changes nothing."""
    from ringtrain.workloads.base import Workload

    workload.augment = types.MethodType(Workload.augment, workload)  # type: ignore[method-assign]
