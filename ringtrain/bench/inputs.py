"""``bench input``: what reading real data costs."""

from __future__ import annotations

import sys
from pathlib import Path

from ringtrain.bench.contenders import DIRECTORY, Command, Comparison, Contender, Experiment
from ringtrain.bench.outcomes import read_figures, read_own_data
from ringtrain.bench.steps import LENGTHS, Length, plan_training


def plan_inputs(
    size: int, length: Length | None, *, data_dir: Path, image_folder: Path | None, records: Path | None
) -> list[Experiment]:
    """cifar10 on its files against synthetic data, and the speed at which one core reads each kind of source given."""
    chosen = length or LENGTHS["CNN"]
    flags = {
        "real": ("CIFAR-10's files", ["--data_dir", str(data_dir)]),
        "made": ("synthetic data of the same shape", ["--synthetic", "true"]),
        "made_again": ("synthetic data once more (A/A)", ["--synthetic", "true"]),
    }
    training = Experiment(
        name="cifar10",
        unit="a step",
        contenders=tuple(
            Contender(
                name=name,
                description=description,
                commands=(plan_training(size, ["--workload", "cifar10", *more], chosen),),
                read=read_own_data,
            )
            for name, (description, more) in flags.items()
        ),
        comparisons=(
            Comparison(name="real", other="made", goal=0.98),
            Comparison(name="made_again", other="made"),
        ),
    )
    readings = plan_readings(image_folder, records)
    return [training, *([readings] if readings.contenders else [])]


def plan_readings(image_folder: Path | None, records: Path | None) -> Experiment:
    """One process on one core, which reads without training."""
    places = {
        "image_folder": ("an image folder", image_folder, "image_folder"),
        "tfrecord": ("TFRecord files", records, "tfrecord"),
        "tfrecord_again": ("the same once more (A/A)", records, "tfrecord"),
        "tfrecord_cached": ("TFRecord files, cached on the node", records, "tfrecord_cached"),
    }
    program = [sys.executable, "-m", "ringtrain.bench.own_reading", "--output", DIRECTORY]
    contenders = tuple(
        Contender(
            name=name,
            description=description,
            commands=(Command(argv=(*program, "--kind", kind, "--data_dir", str(place))),),
            read=read_figures,
        )
        for name, (description, place, kind) in places.items()
        if place is not None
    )
    names = {each.name for each in contenders}
    comparisons = (
        Comparison(name="tfrecord_again", other="tfrecord"),
        Comparison(name="tfrecord", other="image_folder"),
        Comparison(name="tfrecord_cached", other="tfrecord"),
    )
    return Experiment(
        name="reading alone",
        unit="an image",
        contenders=contenders,
        comparisons=tuple(each for each in comparisons if {each.name, each.other} <= names),
    )
