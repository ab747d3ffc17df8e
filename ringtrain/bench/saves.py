"""``bench checkpoint``: what saves cost the training."""

from __future__ import annotations

import sys

from ringtrain.bench.contenders import DIRECTORY, Command, Comparison, Contender, Experiment
from ringtrain.bench.outcomes import read_figures, read_training
from ringtrain.bench.steps import (
    LENGTHS,
    SAVE_EVERY_STEPS,
    Length,
    launch,
    plan_one_process,
    plan_training,
    workload_flags,
)

MODELS = ("CNN", "WIDE")


def plan_saves(size: int, length: Length | None) -> list[Experiment]:
    """A save every 100 steps against none, and a save that is handed over against one that is waited for."""
    chosen = length or LENGTHS["CNN"]
    runs = (
        ("saving", f"a checkpoint every {SAVE_EVERY_STEPS} steps", str(SAVE_EVERY_STEPS)),
        ("none", "a checkpoint at the end alone", "0"),
        ("none_again", "none once more (A/A)", "0"),
    )
    training = Experiment(
        name="CNN, the whole training",
        unit="a step",
        contenders=tuple(
            Contender(
                name=name,
                description=description,
                commands=(plan_training(size, [*workload_flags("CNN"), "--checkpoint_every", every], chosen),),
                read=read_training,
            )
            for name, description, every in runs
        ),
        comparisons=(
            Comparison(name="saving", other="none"),
            Comparison(name="none_again", other="none"),
        ),
        reference=plan_one_process("CNN", size, chosen),
    )
    return [training, *(plan_waits(model, size) for model in MODELS)]


def plan_waits(model: str, size: int) -> Experiment:
    """How long the training stands still for one save."""
    program = [sys.executable, "-m", "ringtrain.bench.own_saves", "--model", model, "--output", DIRECTORY]
    waits = (
        ("handed_over", "written by another thread, as ringtrain does", "handed_over"),
        ("handed_over_again", "the same once more (A/A)", "handed_over"),
        ("written", "waited for until it is on the disk", "written"),
    )
    return Experiment(
        name=f"{model}, the wait for a save",
        unit="a save",
        contenders=tuple(
            Contender(
                name=name,
                description=description,
                commands=(Command(argv=launch(size, [*program, "--how", how])),),
                read=read_figures,
            )
            for name, description, how in waits
        ),
        comparisons=(
            Comparison(name="handed_over", other="written"),
            Comparison(name="handed_over_again", other="handed_over"),
        ),
    )
