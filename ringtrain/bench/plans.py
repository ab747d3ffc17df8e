"""``bench allreduce``, ``input``, ``startup``, ``checkpoint`` and ``settings``: who is measured, and what compared."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ringtrain.bench.contenders import DIRECTORY, Command, Comparison, Contender, Experiment
from ringtrain.bench.outcomes import RUN, read_figures, read_own_data, read_start, read_training
from ringtrain.bench.settings import Settings
from ringtrain.bench.steps import (
    AGAIN,
    AUTOTUNE,
    LENGTHS,
    MINIMAL,
    MINIMAL_STOCK,
    NO_FUSION,
    SAVE_EVERY_STEPS,
    STOCK,
    Length,
    launch,
    peer,
    peer_flags,
    plan_one_process,
    plan_training,
    workload_flags,
    write_order,
)

SIZES = tuple(4**power for power in range(6, 14))  # 4 KiB to 64 MiB
ONE_STEP, TWO_STEPS = Length(steps=1, log_every=1), Length(steps=2, log_every=1)


def own(module: str, *flags: str) -> tuple[str, ...]:
    """A program of ringtrain's own that measures by itself."""
    return (sys.executable, "-m", f"ringtrain.bench.{module}", *flags)


def plan_sums(size: int, settings: Settings) -> Experiment:
    """Sums over all ranks, by sizes: ringtrain's collective, Horovod's and MPI's."""
    flags = ["--sizes", ",".join(map(str, SIZES)), "--output", DIRECTORY]
    ringtrain = Command(launch(size, own("own_sums", *flags)))
    horovod = launch(size, peer("horovod_allreduce.py", flags))
    mpirun = ("mpirun", "-np", str(size), "--oversubscribe", "--bind-to", "none")
    pinned = Command((*horovod, *settings.flags), settings.env)
    mpi = peer("mpi_allreduce.py", [*flags, *settings.flags])
    planned = (
        ("ringtrain", "ringtrain's collective under stock horovodrun", ringtrain),
        ("ringtrain_again", AGAIN, ringtrain),
        ("horovod_stock", "hvd.allreduce under stock horovodrun", Command(horovod)),
        ("horovod", "hvd.allreduce with ringtrain's cores, threads and variables", pinned),
        ("mpi", "mpi4py's Allreduce on the same cores, spinning", Command((*mpirun, *mpi))),
    )
    return Experiment(
        "allreduce",
        "a sum",
        tuple(Contender(name, description, (command,), read_figures) for name, description, command in planned),
        (Comparison("ringtrain_again", "ringtrain"), *(Comparison("ringtrain", name) for name, _, _ in planned[2:])),
        num_bytes={str(num_bytes): num_bytes for num_bytes in SIZES},
    )


def plan_inputs(
    size: int, length: Length | None, *, data_dir: Path | None, image_folder: Path | None, records: Path | None
) -> list[Experiment]:
    """cifar10 on its files against synthetic data, and the speed at which one core reads each kind of source given."""
    planned = (
        ("real", "CIFAR-10's files", ["--data_dir", str(data_dir and data_dir.resolve())]),
        ("made", "synthetic data of the same shape", ["--synthetic", "true"]),
        ("made_again", "synthetic data once more (A/A)", ["--synthetic", "true"]),
    )
    training = tuple(
        Contender(
            name,
            description,
            (plan_training(size, ["--workload", "cifar10", *flags], length or LENGTHS["CNN"]),),
            read_own_data,
        )
        for name, description, flags in planned
    )
    places = (
        ("image_folder", "an image folder", image_folder, "image_folder"),
        ("tfrecord", "TFRecord files", records, "tfrecord"),
        ("tfrecord_again", AGAIN, records, "tfrecord"),
        ("tfrecord_cached", "TFRecord files, cached on the node", records, "tfrecord_cached"),
    )
    program = own("own_reading", "--output", DIRECTORY)
    reading = tuple(
        Contender(
            name, description, (Command((*program, "--kind", kind, "--data_dir", str(place.resolve()))),), read_figures
        )
        for name, description, place, kind in places
        if place is not None
    )
    experiments = (
        Experiment("cifar10", "a step", training, (Comparison("real", "made", 0.98), Comparison("made_again", "made"))),
        Experiment(
            "reading alone",
            "an image",
            reading,
            (
                Comparison("tfrecord_again", "tfrecord"),
                Comparison("tfrecord", "image_folder"),
                Comparison("tfrecord_cached", "tfrecord"),
            ),
        ),
    )
    return [each for each in experiments if each.contenders]


def plan_starts(size: int, settings: Settings, begun: Path) -> Experiment:
    """From the command to the end of the first step: cold starts, and one that goes on after a step.

    Args:
        begun: where the run of one step is kept that the latter goes on from: the reference, which runs first.
    """
    cold = plan_training(size, workload_flags("CNN"), ONE_STEP)
    resumed = plan_training(size, workload_flags("CNN"), TWO_STEPS)
    first = Command(tuple(str(begun) if word == f"{DIRECTORY}/{RUN}" else word for word in cold.argv))
    minimal = launch(size, peer("horovod_minimal.py", peer_flags("CNN", size, ONE_STEP)))
    pinned = Command((*minimal, *settings.flags), settings.env)
    write = functools.partial(write_order, "CNN", size, ONE_STEP.steps)

    def copy(directory: Path) -> None:
        shutil.copytree(begun, directory / RUN, symlinks=True)

    return Experiment(
        "CNN",
        "a start",
        (
            Contender("ringtrain", STOCK, (cold,), read_start),
            Contender("ringtrain_again", AGAIN, (cold,), read_start),
            Contender(
                "ringtrain_resumed", "the same, going on from a checkpoint of step 1", (resumed,), read_start, copy
            ),
            Contender("minimal", MINIMAL, (pinned,), read_start, write),
            Contender("minimal_stock", MINIMAL_STOCK, (Command(minimal),), read_start, write),
        ),
        (
            Comparison("ringtrain_again", "ringtrain"),
            Comparison("ringtrain", "minimal", 1 / 1.15),
            Comparison("ringtrain", "minimal_stock", 1 / 1.15),
            Comparison("ringtrain_resumed", "ringtrain", 1 / 1.05),
        ),
        reference=Contender("begun", "one step", (first,), read_start),
    )


def plan_saves(size: int, length: Length | None) -> list[Experiment]:
    """A save every 100 steps against none, and a save that is handed over against one that is waited for."""
    chosen = length or LENGTHS["CNN"]
    planned = (
        ("saving", f"a checkpoint every {SAVE_EVERY_STEPS} steps", str(SAVE_EVERY_STEPS)),
        ("none", "a checkpoint at the end alone", "0"),
        ("none_again", "none once more (A/A)", "0"),
    )
    training = Experiment(
        "CNN, the whole training",
        "a step",
        tuple(
            Contender(
                name,
                description,
                (plan_training(size, [*workload_flags("CNN"), "--checkpoint_every", every], chosen),),
                read_training,
            )
            for name, description, every in planned
        ),
        (Comparison("saving", "none"), Comparison("none_again", "none")),
        plan_one_process("CNN", size, chosen),
    )
    waits = (
        ("handed_over", "written by another thread, as ringtrain does", "handed_over"),
        ("handed_over_again", AGAIN, "handed_over"),
        ("written", "waited for until it is on the disk", "written"),
    )
    standing = [
        Experiment(
            f"{model}, the wait for a save",
            "a save",
            tuple(
                Contender(
                    name,
                    description,
                    (Command(launch(size, own("own_saves", "--model", model, "--output", DIRECTORY, "--how", how))),),
                    read_figures,
                )
                for name, description, how in waits
            ),
            (Comparison("handed_over", "written"), Comparison("handed_over_again", "handed_over")),
        )
        for model in ("CNN", "WIDE")
    ]
    return [training, *standing]


class Variation(NamedTuple):
    """What is set beside what ringtrain chooses, and what it is compared with."""

    other: str
    env: Mapping[str, str] = {}
    by_horovod: bool = False


RING = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}
# Each rule of ringtrain.runtime.devices undone alone: what the user sets in the environment wins.
VARIATIONS = {
    "ringtrain_again": Variation("ringtrain"),
    "cycle_5_ms": Variation("ringtrain", {"HOROVOD_CYCLE_TIME": "5"}),
    "spinning": Variation("ringtrain", {"OMPI_MCA_mpi_yield_when_idle": "0"}),
    "inter_op_2": Variation("ringtrain", {"TF_NUM_INTEROP_THREADS": "2"}),
    "intra_op_2": Variation("ringtrain", {"TF_NUM_INTRAOP_THREADS": "2"}),
    "horovod": Variation("ringtrain", by_horovod=True),
    # What tells only where Horovod carries the gradients.
    "horovod_again": Variation("horovod", by_horovod=True),
    "horovod_cycle_5_ms": Variation("horovod", {"HOROVOD_CYCLE_TIME": "5"}, by_horovod=True),
    "horovod_cycle_0.2_ms": Variation("horovod", {"HOROVOD_CYCLE_TIME": "0.2"}, by_horovod=True),
    "horovod_inter_op_1": Variation("horovod", {"TF_NUM_INTEROP_THREADS": "1"}, by_horovod=True),
    "horovod_no_fusion": Variation("horovod", NO_FUSION, by_horovod=True),
    "horovod_fusion_128_mib": Variation("horovod", {"HOROVOD_FUSION_THRESHOLD": str(2**27)}, by_horovod=True),
    "horovod_autotune": Variation("horovod", AUTOTUNE, by_horovod=True),
    "horovod_ring": Variation("horovod", RING, by_horovod=True),
    "horovod_tcp": Variation("horovod", {"OMPI_MCA_btl": "self,tcp"}, by_horovod=True),
}
SETTINGS_CONTENDERS = ("ringtrain", *VARIATIONS)


def plan_variations(models: Sequence[str], names: Sequence[str], size: int, length: Length | None) -> list[Experiment]:
    """For each model: ringtrain as it is, and with each rule undone.

    Args:
        names: which of ``SETTINGS_CONTENDERS``; empty: all.
    """
    known = {"ringtrain": Variation("ringtrain"), **VARIATIONS}
    experiments = []
    for model in models:
        chosen = length or LENGTHS[model]
        contenders = []
        for name in [name for name in known if name in (names or known)]:
            flags = ["--backend", "horovod"] if known[name].by_horovod else []
            command = plan_training(size, [*workload_flags(model), *flags], chosen)
            words = [*(f"{key}={value}" for key, value in known[name].env.items()), *flags]
            varied = dataclasses.replace(command, env=known[name].env)
            contenders.append(Contender(name, " ".join(words) or "as it is", (varied,), read_training))
        comparisons = tuple(
            Comparison(*((name, each.other) if name.endswith("_again") else (each.other, name)))
            for name, each in VARIATIONS.items()
        )
        reference = plan_one_process(model, size, chosen)
        experiments.append(Experiment(model, "a step", tuple(contenders), comparisons, reference))
    return experiments
