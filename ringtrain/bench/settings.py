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
        inter_op_threads: where Horovod carries the sums.
        rank_inter_op_threads: of ringtrain's own ranks, whose sums may go through memory.
        env: variables of Horovod, MPI and the C library.
    """

    cores: tuple[tuple[int, ...], ...]
    intra_op_threads: int
    inter_op_threads: int
    rank_inter_op_threads: int
    env: Mapping[str, str]

    @property
    def flags(self) -> list[str]:
        """The same as flags of the peers that sum by Horovod."""
        return self._flags(self.inter_op_threads)

    @property
    def rank_flags(self) -> list[str]:
        """The same as flags of a peer that computes as a rank does."""
        return self._flags(self.rank_inter_op_threads)

    def _flags(self, inter_op_threads: int) -> list[str]:
        cores = [flag for own in self.cores for flag in ("--cores", ",".join(map(str, own)))]
        threads = {"intra_op_threads": self.intra_op_threads, "inter_op_threads": inter_op_threads}
        return [*cores, *(word for name, count in threads.items() for word in (f"--{name}", str(count)))]


def choose_settings(size: int, machine: Machine) -> Settings:
    """The settings of ``size`` ranks on a machine of which no run has taken cores yet."""
    plans = [plan_rank(rank, size, machine) for rank in range(size)]
    return Settings(
        cores=tuple(plan.cores for plan in plans),
        intra_op_threads=plans[0].intra_op_threads,
        inter_op_threads=plans[0].inter_op_threads,
        rank_inter_op_threads=plan_rank(0, size, machine, one_at_a_time=True).inter_op_threads,
        env={setting.name: setting.value for setting in plans[0].settings},
    )


def plan_rank(rank: int, size: int, machine: Machine, *, one_at_a_time: bool = False) -> DevicePlan:
    """What one rank of several on one machine would use."""
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node="", launcher="mpirun (Open MPI)")
    return plan_devices(world, machine, {}, Needs(hang_timeout=Config.hang_timeout, one_at_a_time=one_at_a_time))
