"""``bench step``, ``bench loop`` and ``bench guards``: the time of a training step."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ringtrain.bench.contenders import DIRECTORY, PORT, Command, Comparison, Contender, Experiment, Finished, Outcome
from ringtrain.bench.origin import describe_environment
from ringtrain.bench.outcomes import RUN, read_own_data, read_peer, read_training, read_unconnected
from ringtrain.bench.peers.peer_models import MODELS
from ringtrain.bench.settings import Settings
from ringtrain.data.order import SampleOrder

PEERS = Path(__file__).resolve().parent / "peers"
NO_FUSION = {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_DISABLE_GROUP_FUSION": "1"}
AUTOTUNE = {"HOROVOD_AUTOTUNE": "1"}
TUNED = ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD")  # by it, unless a variable sets them
SAVE_EVERY_STEPS = 100
ORDER_FILE = "order.npy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Length:
    """How long a run trains: ``steps``, in intervals of ``log_every``, of which the first is not timed."""

    steps: int
    log_every: int

    @property
    def flags(self) -> list[str]:
        return ["--steps", str(self.steps), "--log_every", str(self.log_every)]


# The CNN logs as often as ringtrain does by itself.
LENGTHS = {
    "CNN": Length(steps=300, log_every=100),
    "WIDE": Length(steps=150, log_every=50),
    "MANY": Length(steps=400, log_every=100),
    "TINY": Length(steps=2000, log_every=100),
}
GOALS = {
    "CNN": (
        Comparison(name="ringtrain", other="bound", goal=0.97),
        Comparison(name="ringtrain", other="tf_distribute", goal=1.10),
        Comparison(name="ringtrain", other="minimal_stock", goal=1.5),
    ),
    "WIDE": (
        Comparison(name="ringtrain", other="bound", goal=0.75),
        Comparison(name="ringtrain", other="tf_distribute", goal=2.0),
    ),
    "MANY": (
        Comparison(name="ringtrain", other="minimal_no_fusion", goal=1.3),
        Comparison(name="ringtrain", other="minimal", goal=1.0),
    ),
    "TINY": (),
}
LOOP_GOALS = {"CNN": 1 / 1.01, "TINY": 1 / 1.05}
LOOP_CONTENDERS = ("ringtrain_saving", "ringtrain_saving_again", "minimal")
DESCRIPTIONS = {
    "ringtrain": "stock horovodrun python -m ringtrain",
    "ringtrain_again": "the same once more (A/A)",
    "ringtrain_saving": f"ringtrain with logs, guards and a checkpoint every {SAVE_EVERY_STEPS} steps",
    "ringtrain_saving_again": "the same once more (A/A)",
    "bound": "plain TensorFlow processes with ringtrain's cores, threads and variables, without communication",
    "minimal": "hand-written Horovod loop with ringtrain's cores, threads and variables",
    "minimal_stock": "hand-written Horovod loop under stock horovodrun",
    "minimal_no_fusion": "minimal, with Horovod's fusion off",
    "minimal_autotune": "minimal, with HOROVOD_AUTOTUNE",
    "tf_distribute": "tf.distribute MultiWorkerMirroredStrategy, pinned as ringtrain is",
    "one_process": "plain TensorFlow in one process on all cores",
}
OTHER = "ringtrain_other"  # in another environment: --other_python
STEP_CONTENDERS = (*(name for name in DESCRIPTIONS if not name.startswith("ringtrain_saving")), OTHER)


def plan_steps(
    models: Sequence[str],
    names: Sequence[str],
    size: int,
    settings: Settings,
    length: Length | None,
    other_python: Path | None = None,
) -> list[Experiment]:
    """An experiment for each model.

    Args:
        names: which of ``STEP_CONTENDERS``; empty: all.
        length: instead of each model's own.
        other_python: an interpreter whose environment trains as well; None: there is none.
    """
    experiments = []
    for model in models:
        chosen = length or LENGTHS[model]
        contenders = plan_contenders(model, size, settings, chosen)
        if other_python is not None:
            contenders[OTHER] = plan_other(contenders["ringtrain"], other_python)
        wanted = [
            contenders[name] for name in STEP_CONTENDERS if name in (names or STEP_CONTENDERS) and name in contenders
        ]
        kept = {contender.name for contender in wanted}
        others = [Comparison(name="ringtrain_again", other="ringtrain"), *GOALS[model]]
        compared = {(each.name, each.other) for each in others}
        others += [
            Comparison(name="ringtrain", other=name)
            for name in STEP_CONTENDERS
            if name not in ("ringtrain", "ringtrain_again") and ("ringtrain", name) not in compared
        ]
        experiments.append(
            Experiment(
                name=model,
                unit="a step",
                contenders=tuple(wanted),
                comparisons=tuple(each for each in others if {each.name, each.other} <= kept),
                reference=contenders["one_process"],
            )
        )
    return experiments


def plan_loops(models: Sequence[str], size: int, settings: Settings, length: Length | None) -> list[Experiment]:
    """ringtrain with all that it does beside training, against the hand-written loop, which does nothing else.

    Args:
        models: of which those of ``LOOP_GOALS`` are measured.
    """
    experiments = []
    for model, goal in LOOP_GOALS.items():
        if model not in models:
            continue
        contenders = plan_contenders(model, size, settings, length or LENGTHS[model])
        experiments.append(
            Experiment(
                name=model,
                unit="a step",
                contenders=tuple(contenders[name] for name in LOOP_CONTENDERS),
                comparisons=(
                    Comparison(name="ringtrain_saving", other="minimal", goal=goal),
                    Comparison(name="ringtrain_saving_again", other="ringtrain_saving"),
                ),
                reference=contenders["one_process"],
            )
        )
    return experiments


def plan_contenders(model: str, size: int, settings: Settings, length: Length) -> dict[str, Contender]:
    """All contenders that train a model, by name."""
    commands = plan_commands(model, size, settings, length)
    return {
        name: Contender(
            name=name,
            description=description,
            commands=commands[name],
            read=choose_reader(name),
            prepare=functools.partial(write_order, model, size, length.steps),
        )
        for name, description in DESCRIPTIONS.items()
    }


def plan_other(contender: Contender, python: Path) -> Contender:
    """The same with the launcher and the packages of another environment, and this checkout's ringtrain."""
    programs = {"horovodrun": str(python.with_name("horovodrun")), sys.executable: str(python)}
    [command] = contender.commands
    argv = tuple(programs.get(word, word) for word in command.argv)
    return dataclasses.replace(
        contender,
        name=OTHER,
        description=f"ringtrain with {describe_environment(python)}",
        commands=(dataclasses.replace(command, argv=argv),),
    )


def plan_commands(model: str, size: int, settings: Settings, length: Length) -> dict[str, tuple[Command, ...]]:
    """What each contender is started with."""
    flags = peer_flags(model, size, length)
    pinned = [*flags, *settings.flags]
    minimal = launch(size, [sys.executable, str(PEERS / "horovod_minimal.py"), *pinned])
    untuned = {name: value for name, value in settings.env.items() if name not in TUNED}
    training = plan_training(size, workload_flags(model), length)
    saves = ["--checkpoint_every", str(SAVE_EVERY_STEPS)]
    saving = plan_training(size, [*workload_flags(model), *saves], length)
    return {
        "ringtrain": (training,),
        "ringtrain_again": (training,),
        "ringtrain_saving": (saving,),
        "ringtrain_saving_again": (saving,),
        "bound": tuple(
            dataclasses.replace(command, env=settings.env)
            for command in plan_ranks("unconnected.py", size, [*flags, *settings.rank_flags])
        ),
        "minimal": (Command(argv=minimal, env=settings.env),),
        "minimal_stock": (Command(argv=launch(size, [sys.executable, str(PEERS / "horovod_minimal.py"), *flags])),),
        "minimal_no_fusion": (Command(argv=minimal, env={**settings.env, **NO_FUSION}),),
        "minimal_autotune": (Command(argv=minimal, env={**untuned, **AUTOTUNE}),),
        "tf_distribute": tuple(
            dataclasses.replace(command, env={"TF_CONFIG": describe_cluster(size, rank)})
            for rank, command in enumerate(plan_ranks("tf_distribute.py", size, pinned))
        ),
        "one_process": plan_one_process(model, size, length).commands,
    }


def choose_reader(name: str) -> Callable[[Finished], Outcome]:
    """What reads the results of a contender."""
    if name.startswith("ringtrain"):
        return read_training
    return read_unconnected if name == "bound" else read_peer


def plan_guards(size: int, length: Length | None) -> list[Experiment]:
    """What the guards cost that flags turn off: on, off, and on once more."""
    off = ["--check_replicas_every", "0", "--hang_timeout", "0"]
    cifar10 = ["--workload", "cifar10", "--synthetic", "true"]
    # The replicas are compared far more often than every 1000 steps, so that each timed interval has a comparison.
    experiments = []
    for name, flags, goal in (
        ("cifar10", cifar10, 1 / 1.01),
        ("TINY", workload_flags("TINY"), 1 / 1.03),
    ):
        chosen = length or (Length(steps=90, log_every=30) if name == "cifar10" else LENGTHS[name])
        on = ["--check_replicas_every", str(chosen.log_every)]
        contenders = tuple(
            Contender(
                name=which,
                description=description,
                commands=(plan_training(size, [*flags, *more], chosen),),
                read=read_own_data if name == "cifar10" else read_training,
            )
            for which, description, more in (
                ("guards_on", " ".join(on), on),
                ("guards_off", " ".join(off), off),
                ("guards_on_again", "guards_on once more (A/A)", on),
            )
        )
        reference = None if name == "cifar10" else plan_one_process(name, size, chosen)
        experiments.append(
            Experiment(
                name=name,
                unit="a step",
                contenders=contenders,
                comparisons=(
                    Comparison(name="guards_on", other="guards_off", goal=goal),
                    Comparison(name="guards_on_again", other="guards_on"),
                ),
                reference=reference,
            )
        )
    return experiments


def plan_one_process(model: str, size: int, length: Length) -> Contender:
    """The run that all others of a model must agree with."""
    command = Command(argv=(sys.executable, str(PEERS / "one_process.py"), *peer_flags(model, size, length)))
    return Contender(
        name="one_process",
        description=DESCRIPTIONS["one_process"],
        commands=(command,),
        read=read_peer,
        prepare=functools.partial(write_order, model, size, length.steps),
    )


def plan_training(size: int, flags: Sequence[str], length: Length) -> Command:
    """The user's own command: ``horovodrun -np SIZE python -m ringtrain``."""
    run = ["--out", f"{DIRECTORY}/{RUN}"]
    return Command(argv=launch(size, [sys.executable, "-m", "ringtrain", *flags, *length.flags, *run]))


def workload_flags(model: str) -> list[str]:
    """The flags of ringtrain for a model of the benchmark."""
    return ["--workload", f"ringtrain.bench.workloads:{model}"]


def peer_flags(model: str, size: int, length: Length) -> list[str]:
    """The flags of a training script of the peers."""
    order = ["--order", f"{DIRECTORY}/{ORDER_FILE}"]
    return ["--model", model, "--size", str(size), *length.flags, *order, "--output", DIRECTORY]


def write_order(model: str, size: int, steps: int, directory: Path) -> None:
    """Write down which samples ringtrain trains in which step, for peers that are to train the same."""
    spec = MODELS[model]
    order = SampleOrder(num_samples=spec.num_samples, global_batch_size=spec.local_batch_size * size)
    batches = [batch.indices for batch in order.local_batches(0, steps, rank=0, size=1)]
    np.save(directory / ORDER_FILE, np.stack(batches))


def launch(size: int, program: Sequence[str]) -> tuple[str, ...]:
    """The stock command that starts a program on so many ranks."""
    return ("horovodrun", "-np", str(size), *program)


def plan_ranks(script: str, size: int, flags: Sequence[str]) -> tuple[Command, ...]:
    """A process for each rank, started without a launcher."""
    return tuple(
        Command(argv=(sys.executable, str(PEERS / script), "--rank", str(rank), *flags)) for rank in range(size)
    )


def describe_cluster(size: int, rank: int) -> str:
    """TF_CONFIG of a worker; all are on this machine."""
    workers = [f"127.0.0.1:{PORT % number}" for number in range(size)]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
