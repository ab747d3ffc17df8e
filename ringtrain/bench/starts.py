"""``bench startup``: from the command to the end of the first step."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from ringtrain.bench.contenders import DIRECTORY, Command, Comparison, Contender, Experiment
from ringtrain.bench.outcomes import RUN, read_start
from ringtrain.bench.settings import Settings
from ringtrain.bench.steps import PEERS, Length, launch, peer_flags, plan_training, workload_flags, write_order

ONE_STEP, TWO_STEPS = Length(steps=1, log_every=1), Length(steps=2, log_every=1)
MODEL = "CNN"


def plan_starts(size: int, settings: Settings, begun: Path) -> Experiment:
    """Cold starts, and one that goes on after a step.

    Args:
        begun: the run directory of a run of one step, which ``plan_begun`` makes.
    """
    cold = plan_training(size, workload_flags(MODEL), ONE_STEP)
    minimal = [sys.executable, str(PEERS / "horovod_minimal.py"), *peer_flags(MODEL, size, ONE_STEP)]
    write = functools.partial(write_order, MODEL, size, ONE_STEP.steps)
    planned: dict[str, tuple[str, Command, Callable[[Path], None]]] = {
        "ringtrain": ("stock horovodrun python -m ringtrain", cold, _nothing),
        "ringtrain_again": ("the same once more (A/A)", cold, _nothing),
        "ringtrain_resumed": (
            "the same, going on from a checkpoint of step 1",
            plan_training(size, workload_flags(MODEL), TWO_STEPS),
            lambda directory: _copy(begun, directory / RUN),
        ),
        "minimal": (
            "hand-written Horovod loop with ringtrain's cores, threads and variables",
            Command(argv=launch(size, [*minimal, *settings.flags]), env=settings.env),
            write,
        ),
        "minimal_stock": (
            "hand-written Horovod loop under stock horovodrun", Command(argv=launch(size, minimal)), write
        ),
    }  # fmt: skip
    return Experiment(
        name=MODEL,
        unit="a start",
        contenders=tuple(
            Contender(name=name, description=description, commands=(command,), read=read_start, prepare=prepare)
            for name, (description, command, prepare) in planned.items()
        ),
        comparisons=(
            Comparison(name="ringtrain_again", other="ringtrain"),
            Comparison(name="ringtrain", other="minimal", goal=1 / 1.15),
            Comparison(name="ringtrain", other="minimal_stock", goal=1 / 1.15),
            Comparison(name="ringtrain_resumed", other="ringtrain", goal=1 / 1.05),
        ),
    )


def plan_begun(size: int, begun: Path) -> Contender:
    """Trains one step, and keeps the run."""

    command = plan_training(size, workload_flags(MODEL), ONE_STEP)
    argv = tuple(str(begun) if word == f"{DIRECTORY}/{RUN}" else word for word in command.argv)
    return Contender(name="begun", description="one step", commands=(Command(argv=argv),), read=read_start)


def _nothing(directory: Path) -> None:
    del directory


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, symlinks=True)
