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
    """What ``ringtrain.runtime.devices`` plans for the ranks of one machine."""

    flags: list[str]  # cores and threads where Horovod carries the sums, for the peers that sum by it
    rank_flags: list[str]  # those of ringtrain's own ranks, whose sums may go through memory
    env: Mapping[str, str]  # variables of Horovod, MPI and the C library


def choose_settings(size: int, machine: Machine) -> Settings:
    """The settings of ``size`` ranks on a machine of which no run has taken cores yet."""

    def plan_rank(rank: int, *, one_at_a_time: bool = False) -> DevicePlan:
        world = World(rank=rank, size=size, local_rank=rank, local_size=size, node="", launcher="mpirun (Open MPI)")
        return plan_devices(world, machine, {}, Needs(hang_timeout=Config.hang_timeout, one_at_a_time=one_at_a_time))

    plans = [plan_rank(rank) for rank in range(size)]
    flags = [flag for plan in plans for flag in ("--cores", ",".join(map(str, plan.cores)))]
    flags += ["--intra_op_threads", str(plans[0].intra_op_threads), "--inter_op_threads"]
    return Settings(
        flags=[*flags, str(plans[0].inter_op_threads)],
        rank_flags=[*flags, str(plan_rank(0, one_at_a_time=True).inter_op_threads)],
        env={setting.name: setting.value for setting in plans[0].settings},
    )
