"""``benchmarks step``, ``loop`` and ``guards``: the time of a training step."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.contenders import DIRECTORY, PORT, Command, Comparison, Contender, Experiment, contenders_of
from benchmarks.origin import describe_environment
from benchmarks.outcomes import RUN, read_own_data, read_peer, read_training, read_unconnected
from benchmarks.peers.peer_models import MODELS
from benchmarks.settings import BenchOptions, Length, Settings
from ringtrain.data.order import SampleOrder

PEERS = Path(__file__).resolve().parent / "peers"
NO_FUSION = {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_DISABLE_GROUP_FUSION": "1"}
AUTOTUNE = {"HOROVOD_AUTOTUNE": "1"}
TUNED = ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD")  # by autotuning, unless set
SAVE_EVERY_STEPS = 100
ORDER_FILE = "order.npy"
AGAIN = "the same once more (A/A)"
STOCK = "stock horovodrun python -m ringtrain"
MINIMAL = "hand-written Horovod loop with ringtrain's cores, threads and variables"
MINIMAL_STOCK = "hand-written Horovod loop under stock horovodrun"
TF_KERAS = "fit on Keras 2 by bare Horovod, with ringtrain's cores, threads and variables"
UNCONNECTED_FITS = "fit in plain processes, pinned as ringtrain's are, without communication"


# The CNN logs at ringtrain's default.
LENGTHS = {
    "CNN": Length(steps=300, log_every=100),
    "WIDE": Length(steps=150, log_every=50),
    "MANY": Length(steps=400, log_every=100),
    "TINY": Length(steps=2000, log_every=100),
    "WIDE_ADAM": Length(steps=150, log_every=50),
    "MANY_ADAM": Length(steps=400, log_every=100),
    "TRANSFORMER": Length(steps=150, log_every=50),
}
GOALS = {
    "CNN": (
        Comparison("ringtrain", "bound", 0.97),
        Comparison("ringtrain", "tf_distribute", 1.10),
        Comparison("ringtrain", "minimal_stock", 1.5),
    ),
    "WIDE": (Comparison("ringtrain", "bound", 0.75), Comparison("ringtrain", "tf_distribute", 2.0)),
    "MANY": (Comparison("ringtrain", "minimal_no_fusion", 1.3), Comparison("ringtrain", "minimal", 1.0)),
    "TINY": (),
    "WIDE_ADAM": (
        Comparison("ringtrain_sharded", "bound_fused", 1.0),
        Comparison("ringtrain_sharded", "bound", 2.0),
        Comparison("ringtrain_sharded", "ringtrain"),
    ),
    "MANY_ADAM": (Comparison("ringtrain_sharded", "bound_fused"), Comparison("ringtrain_sharded", "ringtrain")),
    "TRANSFORMER": (Comparison("ringtrain_sharded", "bound_fused"), Comparison("ringtrain_sharded", "ringtrain")),
}
LOOP_GOALS = {"CNN": 1 / 1.01, "TINY": 1 / 1.05}
FIT_GOALS: dict[str, float | None] = {"CNN": 0.97, "WIDE": 0.85, "MANY": 0.80, "TINY": 0.80}
MANY_FIT_GOALS = {"TINY": 1.1}
FIT_CONTENDERS = ("ringtrain", "ringtrain_again", "many", "horovod", "tf_keras", "kept", "bound")
OTHER = "ringtrain_other"  # in another environment: --other_python
STEP_CONTENDERS = (
    "ringtrain", "ringtrain_again", "ringtrain_single", "ringtrain_sharded", "ringtrain_tracked", "bound",
    "bound_meeting", "bound_looped", "bound_fused", "minimal", "minimal_stock", "minimal_no_fusion",
    "minimal_autotune", "tf_distribute",
    "one_process", OTHER,
)  # fmt: skip


def plan_steps(options: BenchOptions, settings: Settings) -> list[Experiment]:
    experiments = []
    for model in options.model_names:
        contenders = plan_contenders(model, options, settings)
        if options.other_python is not None:
            contenders[OTHER] = plan_other(contenders["ringtrain"], options.other_python)
        names = options.contender_names or contenders
        wanted = [name for name in STEP_CONTENDERS if name in contenders and name in names]
        first = [Comparison("ringtrain_again", "ringtrain"), *GOALS[model]]
        compared = {each.other for each in first} | {each.name for each in first}
        others = [Comparison("ringtrain", name) for name in STEP_CONTENDERS[2:] if name not in compared]
        chosen = tuple(contenders[name] for name in wanted)
        experiments.append(Experiment(model, "a step", chosen, (*first, *others), contenders["one_process"]))
    return experiments


def plan_loops(options: BenchOptions, settings: Settings) -> list[Experiment]:
    """ringtrain with logs, guards and saves against a hand-written loop without."""
    experiments = []
    for model in [model for model in LOOP_GOALS if model in options.model_names]:
        contenders = plan_contenders(model, options, settings)
        names = ("ringtrain_saving", "ringtrain_saving_again", "minimal")
        comparisons = (
            Comparison("ringtrain_saving", "minimal", LOOP_GOALS[model]),
            Comparison("ringtrain_saving_again", "ringtrain_saving"),
        )
        chosen = tuple(contenders[name] for name in names)
        experiments.append(Experiment(model, "a step", chosen, comparisons, contenders["one_process"]))
    return experiments


def plan_fits(options: BenchOptions, settings: Settings) -> list[Experiment]:
    """``model.fit`` on all ranks against unconnected processes."""
    experiments = []
    for model in options.model_names:
        size, length = options.size, options.length(LENGTHS[model])
        # The last call of many steps has one step, whose loss is compared.
        length = dataclasses.replace(length, steps=length.steps + 1)
        flags = peer_flags(model, size, length)

        def fit(how: str, *more: str, flags: list[str] = flags) -> list[Command]:
            return [Command(launch(options.size, own("own_fits", "--how", how, *flags, *more)))]

        keras_2 = [Command(launch(size, peer("horovod_tf_keras.py", [*flags, *settings.flags])), settings.env)]
        apart = ["--how", "unconnected", *flags, *settings.rank_flags]
        bound = [Command(own("own_fits", "--rank", str(rank), *apart), settings.env) for rank in range(size)]
        planned = (
            ("ringtrain", "fit by ringtrain.keras, as init() has it", fit("ringtrain"), read_peer),
            ("ringtrain_again", AGAIN, fit("ringtrain"), read_peer),
            ("many", "the same with steps_per_execution=20", fit("ringtrain", "--steps_per_call", "20"), read_peer),
            ("horovod", 'the same with init(backend="horovod")', fit("horovod"), read_peer),
            ("kept", "the same with callbacks.Run", fit("kept"), read_peer),
            *([("tf_keras", TF_KERAS, keras_2, read_peer)] if find_spec("tf_keras") else []),
            ("bound", UNCONNECTED_FITS, bound, read_unconnected),
        )
        prepare = functools.partial(write_order, model, size, length.steps)
        wanted = [row for row in planned if row[0] in (options.contender_names or FIT_CONTENDERS)]
        contenders = tuple(Contender(name, text, tuple(argv), read, prepare) for name, text, argv, read in wanted)
        comparisons = (
            Comparison("ringtrain_again", "ringtrain"),
            Comparison("ringtrain", "bound", FIT_GOALS.get(model)),
            Comparison("many", "bound", MANY_FIT_GOALS.get(model)),
            Comparison("ringtrain", "horovod"),
            Comparison("ringtrain", "tf_keras"),
            Comparison("kept", "ringtrain"),
        )
        reference = plan_one_process(model, size, length)
        experiments.append(Experiment(model, "a step of fit", contenders, comparisons, reference))
    return experiments


def plan_guards(options: BenchOptions, _: Settings) -> list[Experiment]:
    """Cost of optional guards: on, off, and on again."""
    # Replicas are compared more often than by default, in each timed interval.
    experiments = []
    for name, flags, usual, goal in (
        ("cifar10", ["--workload", "cifar10", "--synthetic", "true"], Length(steps=90, log_every=30), 1 / 1.01),
        ("TINY", workload_flags("TINY"), LENGTHS["TINY"], 1 / 1.03),
    ):
        length = options.length(usual)
        on = ["--check_replicas_every", str(length.log_every)]
        off = ["--check_replicas_every", "0", "--hang_timeout", "0"]
        has_reference = name in MODELS
        read = read_training if has_reference else read_own_data
        reference = plan_one_process(name, options.size, length) if has_reference else None
        guarded, unguarded = (plan_training(options.size, [*flags, *more], length) for more in (on, off))
        contenders = contenders_of(
            read,
            ("guards_on", " ".join(on), guarded),
            ("guards_off", " ".join(off), unguarded),
            ("guards_on_again", "guards_on once more (A/A)", guarded),
        )
        comparisons = (Comparison("guards_on", "guards_off", goal), Comparison("guards_on_again", "guards_on"))
        experiments.append(Experiment(name, "a step", contenders, comparisons, reference))
    return experiments


def plan_contenders(model: str, options: BenchOptions, settings: Settings) -> dict[str, Contender]:
    size, length = options.size, options.length(LENGTHS[model])
    flags = peer_flags(model, size, length)
    pinned = [*flags, *settings.flags]
    minimal = launch(size, peer("horovod_minimal.py", pinned))
    untuned = {name: value for name, value in settings.env.items() if name not in TUNED}
    training = plan_training(size, workload_flags(model), length)
    saving = plan_training(size, [*workload_flags(model), "--checkpoint_every", str(SAVE_EVERY_STEPS)], length)
    bound = [Command(argv, settings.env) for argv in plan_ranks("unconnected.py", size, [*flags, *settings.rank_flags])]
    fused = [dataclasses.replace(each, argv=(*each.argv, "--fused")) for each in bound]
    looped = [dataclasses.replace(each, argv=(*each.argv, "--steps_per_call", "20")) for each in bound]
    meeting = [dataclasses.replace(each, argv=(*each.argv, "--meets")) for each in bound]
    single = plan_training(size, [*workload_flags(model), "--steps_per_call", "1"], length)
    workers = [
        Command(argv, {"TF_CONFIG": describe_cluster(size, rank)})
        for rank, argv in enumerate(plan_ranks("tf_distribute.py", size, pinned))
    ]
    no_fusion = {**settings.env, **NO_FUSION}
    saving_text = f"ringtrain with logs, guards and a checkpoint every {SAVE_EVERY_STEPS} steps"
    sharded = plan_training(size, [*workload_flags(model), "--shard_optimizer", "true"], length)
    tracked = plan_training(size, [*workload_flags(model), "--tracker", "mlflow"], length)
    tracked = dataclasses.replace(tracked, env={"MLFLOW_TRACKING_URI": f"sqlite:///{DIRECTORY}/mlflow.db"})
    tracked_text = "ringtrain --tracker mlflow, with a database file"
    bound_text = "plain TensorFlow processes with ringtrain's cores, threads and variables, without communication"
    workers_text = "tf.distribute MultiWorkerMirroredStrategy, pinned as ringtrain is"
    planned = (
        ("ringtrain", STOCK, [training], read_training),
        ("ringtrain_again", AGAIN, [training], read_training),
        ("ringtrain_saving", saving_text, [saving], read_training),
        ("ringtrain_saving_again", AGAIN, [saving], read_training),
        ("ringtrain_sharded", "ringtrain --shard_optimizer true", [sharded], read_training),
        ("ringtrain_single", "ringtrain --steps_per_call 1", [single], read_training),
        *([("ringtrain_tracked", tracked_text, [tracked], read_training)] if find_spec("mlflow") else []),
        ("bound", bound_text, bound, read_unconnected),
        ("bound_meeting", "bound with a barrier before each step", meeting, read_unconnected),
        ("bound_looped", "bound with 20 steps in a call", looped, read_unconnected),
        ("bound_fused", "bound with updates by one operation each", fused, read_unconnected),
        ("minimal", MINIMAL, [Command(minimal, settings.env)], read_peer),
        ("minimal_stock", MINIMAL_STOCK, [Command(launch(size, peer("horovod_minimal.py", flags)))], read_peer),
        ("minimal_no_fusion", "minimal, with Horovod's fusion off", [Command(minimal, no_fusion)], read_peer),
        ("minimal_autotune", "minimal, with HOROVOD_AUTOTUNE", [Command(minimal, {**untuned, **AUTOTUNE})], read_peer),
        ("tf_distribute", workers_text, workers, read_peer),
    )
    prepare = functools.partial(write_order, model, size, length.steps)
    contenders = {name: Contender(name, text, tuple(commands), read, prepare) for name, text, commands, read in planned}
    return {**contenders, "one_process": plan_one_process(model, size, length)}


def plan_other(contender: Contender, python: Path) -> Contender:
    """Use launcher and packages of another environment, and this checkout's ringtrain."""
    programs = {"horovodrun": str(python.with_name("horovodrun")), sys.executable: str(python)}
    [command] = contender.commands
    other = Command(tuple(programs.get(word, word) for word in command.argv), command.env)
    description = f"ringtrain with {describe_environment(python)}"
    return dataclasses.replace(contender, name=OTHER, description=description, commands=(other,))


def plan_one_process(model: str, size: int, length: Length) -> Contender:
    """Reference for all others of a model."""
    return Contender(
        "one_process",
        "plain TensorFlow in one process on all cores",
        (Command(peer("one_process.py", peer_flags(model, size, length))),),
        read_peer,
        functools.partial(write_order, model, size, length.steps),
    )


def plan_training(size: int, flags: Sequence[str], length: Length) -> Command:
    """``horovodrun -np SIZE python -m ringtrain``."""
    run = ["--out", f"{DIRECTORY}/{RUN}"]
    return Command(launch(size, (sys.executable, "-m", "ringtrain", *flags, *length.flags, *run)))


def workload_flags(model: str) -> list[str]:
    return ["--workload", f"benchmarks.workloads:{model}"]


def peer_flags(model: str, size: int, length: Length) -> list[str]:
    order = ["--order", f"{DIRECTORY}/{ORDER_FILE}"]
    return ["--model", model, "--size", str(size), *length.flags, *order, "--output", DIRECTORY]


def write_order(model: str, size: int, steps: int, directory: Path) -> None:
    """Write ringtrain's samples per step, for peers to train the same."""
    spec = MODELS[model]
    order = SampleOrder(num_samples=spec.num_samples, global_batch_size=spec.local_batch_size * size)
    batches = [batch.indices for batch in order.local_batches(0, steps, rank=0, size=1)]
    np.save(directory / ORDER_FILE, np.stack(batches))


def launch(size: int, program: Sequence[str]) -> tuple[str, ...]:
    return ("horovodrun", "-np", str(size), *program)


def own(module: str, *flags: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"benchmarks.{module}", *flags)


def peer(script: str, flags: Sequence[str]) -> tuple[str, ...]:
    return (sys.executable, str(PEERS / script), *flags)


def plan_ranks(script: str, size: int, flags: Sequence[str]) -> list[tuple[str, ...]]:
    """One process per rank, without a launcher."""
    return [peer(script, ["--rank", str(rank), *flags]) for rank in range(size)]


def describe_cluster(size: int, rank: int) -> str:
    """Return TF_CONFIG of a worker on this machine."""
    workers = [f"127.0.0.1:{PORT % number}" for number in range(size)]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
