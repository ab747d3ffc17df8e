"""What the user wants to be measured, and the settings that ringtrain would choose, for peers to have the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.peer_models import MODELS
from ringtrain.config import Config
from ringtrain.errors import UsageError
from ringtrain.runtime.devices import DevicePlan, Needs, plan_devices
from ringtrain.runtime.machine import Machine
from ringtrain.runtime.world import World


@dataclass(frozen=True, kw_only=True)
class Length:
    """``steps`` in intervals of ``log_every``, the first not timed."""

    steps: int
    log_every: int

    @property
    def flags(self) -> list[str]:
        return ["--steps", str(self.steps), "--log_every", str(self.log_every)]


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    rounds: int = 7
    """rounds, in each of which every contender runs once"""

    size: int = 2
    """ranks"""

    models: str = ",".join(MODELS)
    """models of step, fit, loop (CNN and TINY alone) and settings, such as CNN,WIDE"""

    contenders: str = ""
    """contenders of step, fit and settings, such as ringtrain,ringtrain_again,bound; by default all"""

    other_python: Path | None = None
    """for step: the interpreter of another environment, in which ringtrain trains as well (ringtrain_other)"""

    steps: int | None = None
    """steps of a run, instead of each model's own; a multiple of log_every"""

    log_every: int | None = None
    """steps of an interval, instead of each model's own; the first is not timed"""

    seed: int = 0
    """seed of the order within the rounds"""

    timeout: float = 300.0
    """seconds that a run of a contender may take"""

    data_dir: Path | None = None
    """CIFAR-10's files, for input"""

    image_folder: Path | None = None
    """image folder that is read, for input"""

    records: Path | None = None
    """TFRecord files that are read, for input, such as ringtrain convert makes of the image folder"""

    output: Path | None = None
    """result file (default: results/bench-MODE.json)"""

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("size", 1), ("timeout", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        for word in self.model_names:
            if word not in MODELS:
                raise UsageError(f"models names {word!r}; there are {', '.join(MODELS)}.")
        for name, model in MODELS.items():
            if model.num_samples % (model.local_batch_size * self.size):
                raise UsageError(
                    f"size is {self.size}; the {model.num_samples} samples of {name} must be whole batches of "
                    f"{model.local_batch_size} for each rank. Choose 1, 2, 3, 4, 5, 6, 8, 10 or 12."
                )
        if (self.steps is None) != (self.log_every is None):
            raise UsageError("steps and log_every go together; give both, or none of them.")
        steps, log_every = (2, 1) if self.steps is None or self.log_every is None else (self.steps, self.log_every)
        if log_every < 1 or steps % log_every or steps < 2 * log_every:
            raise UsageError(
                f"steps is {steps} and log_every is {log_every}; steps must be a multiple of log_every, and at least "
                "twice as many, because the first interval is not timed."
            )
        for name in ("data_dir", "image_folder", "records"):
            path = getattr(self, name)
            if path is not None and not path.is_dir():
                raise UsageError(f"{name} {str(path)!r} is no directory that can be read. Check the path.")

    @property
    def model_names(self) -> list[str]:
        return [name for name in self.models.split(",") if name]

    @property
    def contender_names(self) -> list[str]:
        return [name for name in self.contenders.split(",") if name]

    def length(self, usual: Length) -> Length:
        if self.steps is None or self.log_every is None:
            return usual
        return Length(steps=self.steps, log_every=self.log_every)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Plan of ``ringtrain.runtime.devices`` for the ranks of one machine."""

    flags: list[str]  # cores and threads for peers that sum by Horovod
    rank_flags: list[str]  # of ringtrain's ranks, whose sums may be native
    env: Mapping[str, str]  # variables of Horovod, MPI and the C library


def choose_settings(size: int, machine: Machine) -> Settings:
    """Plan ``size`` ranks on an idle machine."""

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
