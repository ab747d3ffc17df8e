"""The settings that ringtrain would choose on this machine, for peers that are to be measured with the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ringtrain.config import Config
from ringtrain.runtime.devices import DevicePlan, Needs, plan_devices
from ringtrain.runtime.machine import Machine
from ringtrain.runtime.world import World


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What ``ringtrain.runtime.devices`` plans for the ranks of one machine.

    Attributes:
        cores: of each rank.
        flags: the same with the threads of where Horovod carries the sums, for the peers that sum by it.
        rank_flags: with those of ringtrain's own ranks, whose sums may go through memory.
        env: variables of Horovod, MPI and the C library.
    """

    cores: tuple[tuple[int, ...], ...]
    flags: list[str]
    rank_flags: list[str]
    env: Mapping[str, str]


def choose_settings(size: int, machine: Machine) -> Settings:
    """The settings of ``size`` ranks on a machine of which no run has taken cores yet."""
    plans = [plan_rank(rank, size, machine) for rank in range(size)]
    cores = tuple(plan.cores for plan in plans)

    def flags(plan: DevicePlan) -> list[str]:
        threads = [
            "--intra_op_threads",
            str(plans[0].intra_op_threads),
            "--inter_op_threads",
            str(plan.inter_op_threads),
        ]
        return [*(flag for own in cores for flag in ("--cores", ",".join(map(str, own)))), *threads]

    return Settings(
        cores=cores,
        flags=flags(plans[0]),
        rank_flags=flags(plan_rank(0, size, machine, one_at_a_time=True)),
        env={setting.name: setting.value for setting in plans[0].settings},
    )


def plan_rank(rank: int, size: int, machine: Machine, *, one_at_a_time: bool = False) -> DevicePlan:
    """What one rank of several on one machine would use."""
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node="", launcher="mpirun (Open MPI)")
    return plan_devices(world, machine, {}, Needs(hang_timeout=Config.hang_timeout, one_at_a_time=one_at_a_time))
