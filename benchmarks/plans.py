"""``benchmarks allreduce``, ``input``, ``startup``, ``checkpoint`` and ``settings``: contenders and comparisons."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks.contenders import DIRECTORY, Command, Comparison, Contender, Experiment, contenders_of
from benchmarks.outcomes import RUN, read_figures, read_own_data, read_start, read_training
from benchmarks.settings import BenchOptions, Length, Settings
from benchmarks.steps import (
    AGAIN,
    AUTOTUNE,
    LENGTHS,
    MINIMAL,
    MINIMAL_STOCK,
    NO_FUSION,
    SAVE_EVERY_STEPS,
    STOCK,
    launch,
    own,
    peer,
    peer_flags,
    plan_fits,
    plan_guards,
    plan_loops,
    plan_one_process,
    plan_steps,
    plan_training,
    workload_flags,
    write_order,
)

SIZES = tuple(4**power for power in range(6, 15))  # 4 KiB to 256 MiB
BEGUN = "begun-run"
ONE_STEP, TWO_STEPS = Length(steps=1, log_every=1), Length(steps=2, log_every=1)


def plan_sums(options: BenchOptions, settings: Settings) -> list[Experiment]:
    size = options.size
    flags = ["--sizes", ",".join(map(str, SIZES)), "--output", DIRECTORY]

    def ringtrain(how: str) -> Command:
        return Command(launch(size, own("own_sums", *flags, "--how", how)))

    horovod = launch(size, peer("horovod_allreduce.py", flags))
    pinned, eager = (Command((*horovod, *settings.flags, "--how", how), settings.env) for how in ("function", "eager"))
    mpirun = ("mpirun", "-np", str(size), "--oversubscribe", "--bind-to", "none")
    mpi = Command((*mpirun, *peer("mpi_allreduce.py", [*flags, *settings.flags])))
    contenders = contenders_of(
        read_figures,
        ("ringtrain", "ringtrain's collective in a tf.function, where all ranks read one sum", ringtrain("function")),
        ("ringtrain_again", AGAIN, ringtrain("function")),
        ("ringtrain_copied", "the same, each rank with a sum of its own", ringtrain("copied")),
        ("ringtrain_eager", "the same outside of a tf.function", ringtrain("eager")),
        ("nothing", "a tf.function of the same signature without communication", ringtrain("nothing")),
        ("horovod_stock", "hvd.allreduce in a tf.function under stock horovodrun", Command(horovod)),
        ("horovod", "the same with ringtrain's cores, threads and variables", pinned),
        ("horovod_eager", "the same outside of a tf.function", eager),
        ("mpi_in_function", "MPI's Allreduce by tf.numpy_function in a tf.function", ringtrain("mpi")),
        ("mpi", "mpi4py's Allreduce of NumPy arrays on the same cores, spinning", mpi),
    )
    others = [Comparison("ringtrain", each.name) for each in contenders[2:]]
    comparisons = (Comparison("ringtrain_again", "ringtrain"), *others)
    num_bytes = {str(num_bytes): num_bytes for num_bytes in SIZES}
    return [Experiment("allreduce", "a sum", contenders, comparisons, num_bytes=num_bytes)]


def plan_inputs(options: BenchOptions, _: Settings) -> list[Experiment]:
    """cifar10 from files and pipelines against synthetic data; reading speed of one core."""

    def train(*flags: str, workload: str = "cifar10") -> Command:
        return plan_training(options.size, ["--workload", workload, *flags], options.length(LENGTHS["CNN"]))

    def pipe(workload: str) -> Command:
        return train("--synthetic", "true", workload=f"benchmarks.pipelines:{workload}")

    def read(kind: str, place: Path | None) -> Command:
        return Command(own("own_reading", "--output", DIRECTORY, "--kind", kind, "--data_dir", full(place)))

    def full(place: Path | None) -> str:
        return str(place and place.resolve())

    image_folder, records = options.image_folder, options.records

    training = contenders_of(
        read_own_data,
        ("real", "CIFAR-10's files", train("--data_dir", full(options.data_dir))),
        ("made", "synthetic data of the same shape", train("--synthetic", "true")),
        ("made_again", "synthetic data once more (A/A)", train("--synthetic", "true")),
        ("dataset", "these by one tf.data.Dataset for all ranks", pipe("OneDataset")),
        ("sharded", "these by a tf.data.Dataset for each rank", pipe("ShardedDataset")),
        ("pydataset", "these by a keras.utils.PyDataset for each rank", pipe("KerasPyDataset")),
        *([("grain", "these by a grain.MapDataset", pipe("GrainDataset"))] if find_spec("grain") else []),
    )
    pipelines = [each.name for each in training[3:]]
    images = contenders_of(read_figures, ("image_folder", "an image folder", read("image_folder", image_folder)))
    tfrecords = contenders_of(
        read_figures,
        ("tfrecord", "TFRecord files", read("tfrecord", records)),
        ("tfrecord_again", AGAIN, read("tfrecord", records)),
    )
    reading = (images if image_folder else ()) + (tfrecords if records else ())
    compared = (
        Comparison("tfrecord_again", "tfrecord"),
        Comparison("tfrecord", "image_folder"),
    )
    experiments = (
        Experiment(
            "cifar10",
            "a step",
            training,
            (
                Comparison("real", "made", 0.98),
                Comparison("made_again", "made"),
                *(Comparison(name, "made", 0.98) for name in pipelines),
            ),
        ),
        Experiment("reading alone", "an image", reading, compared),
    )
    return [each for each in experiments if each.contenders]


def plan_starts(options: BenchOptions, settings: Settings) -> list[Experiment]:
    """From the command to the end of the first step: cold starts, and a resume.

    The latter resumes the reference's run, which is first and kept next to the others' directories.
    """
    size = options.size
    cold = plan_training(size, workload_flags("CNN"), ONE_STEP)
    resumed = plan_training(size, workload_flags("CNN"), TWO_STEPS)
    first = Command((*cold.argv[:-1], f"{DIRECTORY}/../{BEGUN}"))
    minimal = launch(size, peer("horovod_minimal.py", peer_flags("CNN", size, ONE_STEP)))
    pinned = Command((*minimal, *settings.flags), settings.env)
    write = functools.partial(write_order, "CNN", size, ONE_STEP.steps)

    def copy(directory: Path) -> None:
        shutil.copytree(directory.parent / BEGUN, directory / RUN, symlinks=True)

    going_on = "the same, resuming from a checkpoint of step 1"
    contenders = (
        *contenders_of(read_start, ("ringtrain", STOCK, cold), ("ringtrain_again", AGAIN, cold)),
        Contender("ringtrain_resumed", going_on, (resumed,), read_start, copy),
        Contender("minimal", MINIMAL, (pinned,), read_start, write),
        Contender("minimal_stock", MINIMAL_STOCK, (Command(minimal),), read_start, write),
    )
    comparisons = (
        Comparison("ringtrain_again", "ringtrain"),
        Comparison("ringtrain", "minimal", 1 / 1.15),
        Comparison("ringtrain", "minimal_stock", 1 / 1.15),
        Comparison("ringtrain_resumed", "ringtrain", 1 / 1.05),
    )
    [reference] = contenders_of(read_start, ("begun", "one step", first))
    return [Experiment("CNN", "a start", contenders, comparisons, reference)]


def plan_saves(options: BenchOptions, _: Settings) -> list[Experiment]:
    """A save every 100 steps against none, and an asynchronous save against a synchronous one."""
    size, length = options.size, options.length(LENGTHS["CNN"])

    def train(checkpoint_every: int) -> Command:
        flags = [*workload_flags("CNN"), "--checkpoint_every", str(checkpoint_every)]
        return plan_training(size, flags, length)

    def save(model: str, how: str) -> Command:
        return Command(launch(size, own("own_saves", "--model", model, "--output", DIRECTORY, "--how", how)))

    training = contenders_of(
        read_training,
        ("saving", f"a checkpoint every {SAVE_EVERY_STEPS} steps", train(SAVE_EVERY_STEPS)),
        ("none", "a checkpoint at the end alone", train(0)),
        ("none_again", "none once more (A/A)", train(0)),
    )
    compared = (Comparison("saving", "none"), Comparison("none_again", "none"))
    reference = plan_one_process("CNN", size, length)
    experiments = [Experiment("CNN, the whole training", "a step", training, compared, reference)]
    for model in ("CNN", "WIDE"):
        saving = contenders_of(
            read_figures,
            ("handed_over", "written by another thread, as ringtrain does", save(model, "handed_over")),
            ("handed_over_again", AGAIN, save(model, "handed_over")),
            ("written", "waited for until it is on the disk", save(model, "written")),
        )
        compared = (Comparison("handed_over", "written"), Comparison("handed_over_again", "handed_over"))
        experiments.append(Experiment(f"{model}, the wait for a save", "a save", saving, compared))
    return experiments


class Variation(NamedTuple):
    """``env`` in addition to ringtrain's settings; ``other``: contender to compare with."""

    other: str
    env: Mapping[str, str] = {}
    backend: str = "auto"


RING = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}
# Each undoes one rule of ringtrain.runtime.devices: the environment takes precedence.
VARIATIONS = {
    "ringtrain_again": Variation("ringtrain"),
    "cycle_5_ms": Variation("ringtrain", {"HOROVOD_CYCLE_TIME": "5"}),
    "spinning": Variation("ringtrain", {"OMPI_MCA_mpi_yield_when_idle": "0"}),
    "inter_op_2": Variation("ringtrain", {"TF_NUM_INTEROP_THREADS": "2"}),
    "intra_op_2": Variation("ringtrain", {"TF_NUM_INTRAOP_THREADS": "2"}),
    "horovod": Variation("ringtrain", backend="horovod"),
    # Has an effect only if Horovod reduces the gradients.
    "horovod_again": Variation("horovod", backend="horovod"),
    "horovod_cycle_5_ms": Variation("horovod", {"HOROVOD_CYCLE_TIME": "5"}, backend="horovod"),
    "horovod_cycle_0.2_ms": Variation("horovod", {"HOROVOD_CYCLE_TIME": "0.2"}, backend="horovod"),
    "horovod_inter_op_1": Variation("horovod", {"TF_NUM_INTEROP_THREADS": "1"}, backend="horovod"),
    "horovod_no_fusion": Variation("horovod", NO_FUSION, backend="horovod"),
    "horovod_fusion_128_mib": Variation("horovod", {"HOROVOD_FUSION_THRESHOLD": str(2**27)}, backend="horovod"),
    "horovod_autotune": Variation("horovod", AUTOTUNE, backend="horovod"),
    "horovod_ring": Variation("horovod", RING, backend="horovod"),
    "horovod_tcp": Variation("horovod", {"OMPI_MCA_btl": "self,tcp"}, backend="horovod"),
}
SETTINGS_CONTENDERS = ("ringtrain", *VARIATIONS)


def plan_variations(options: BenchOptions, _: Settings) -> list[Experiment]:
    """For each model: ringtrain unchanged, and with each rule undone."""
    known = {"ringtrain": Variation("ringtrain"), **VARIATIONS}
    experiments = []
    for model in options.model_names:
        length = options.length(LENGTHS[model])
        rows = []
        for name in [name for name in known if name in (options.contender_names or known)]:
            backend = known[name].backend
            flags = [] if backend == "auto" else ["--backend", backend]
            command = plan_training(options.size, [*workload_flags(model), *flags], length)
            words = [*(f"{key}={value}" for key, value in known[name].env.items()), *flags]
            rows.append((name, " ".join(words) or "as it is", Command(command.argv, known[name].env)))
        comparisons = tuple(
            Comparison(*((name, each.other) if name.endswith("_again") else (each.other, name)))
            for name, each in VARIATIONS.items()
        )
        reference = plan_one_process(model, options.size, length)
        experiments.append(Experiment(model, "a step", contenders_of(read_training, *rows), comparisons, reference))
    return experiments


PLANS: Mapping[str, Callable[[BenchOptions, Settings], list[Experiment]]] = {
    "step": plan_steps,
    "fit": plan_fits,
    "loop": plan_loops,
    "allreduce": plan_sums,
    "input": plan_inputs,
    "startup": plan_starts,
    "checkpoint": plan_saves,
    "guards": plan_guards,
    "settings": plan_variations,
}
