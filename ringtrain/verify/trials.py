"""The trainings that ``verify`` compares: the settings' own in float64 and float32, and other paths of the same step.

Which path a run takes depends on its hardware: gradients leave in one sum or in groups, and updates may be sharded.
Each is therefore tried on every machine, for a few steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ringtrain.config import Config

BEGINNING = "float64-beginning"  # the record of the first steps of the reference in float64
BEGINNING_STEPS = 2
OWN = "own"
AS_VECTOR = "gradients as one vector"
MICRO_BATCHES = "micro-batches"  # the name of what is skipped of a trial


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of the workload.

    Attributes:
        name: of its record.
        words: how it differs from the other trainings.
        config: its settings.
        reference: the name of the record that it is compared with.
        in_groups: of the gradients' reduction.
        is_vector: True to reduce all gradients as one vector, as backends without lists of tensors do.
        is_plain: True for plain SGD: a step of Adam would divide by gradients that are nothing but rounding.
        lossy: options of the run that lose precision, without which this trial runs.
        max_steps: after which it ends; the learning rate is that of a run of all steps.
    """

    name: str
    words: str
    config: Config
    reference: str
    in_groups: bool | None = None
    is_vector: bool = False
    is_plain: bool = False
    max_steps: int | None = None
    lossy: str = ""

    @property
    def is_lossy(self) -> bool:
        """True for the settings' own precision and compression, in which nothing is exact."""
        return self.name == OWN


def plan_trials(config: Config, *, is_reference: bool) -> list[Trial]:
    """The trainings of one world size, for the settings of a run."""
    exact = dataclasses.replace(config, precision="float64", compression="none")
    lossy = describe_lossy(config)
    trials = [
        Trial(
            name="float64",
            words="gradients in one sum",
            config=exact,
            reference="float64",
            in_groups=False,
            lossy=lossy,
        ),
        Trial(
            name="float32",
            words="gradients in groups",
            config=dataclasses.replace(exact, precision="float32", steps=1, epochs=None),
            reference="float32",
            in_groups=True,
            is_plain=True,
        ),
    ]
    if lossy:
        own = dataclasses.replace(config, steps=1, epochs=None)
        trials.append(Trial(name=OWN, words=lossy, config=own, reference=OWN, is_plain=True))
    return trials if is_reference else trials + plan_other_paths(exact)


def plan_other_paths(exact: Config) -> list[Trial]:
    """Paths that these settings do not take; the reference is the beginning of the run that takes them."""
    sharded = dataclasses.replace(exact, shard_optimizer=not exact.shard_optimizer)
    accumulating = dataclasses.replace(exact, accumulate=1 if exact.accumulate > 1 else 2)
    return [
        Trial(
            name="float64-sharded",
            words=f"gradients in groups, updates {'sharded' if sharded.shard_optimizer else 'not sharded'}",
            config=sharded,
            reference=BEGINNING,
            in_groups=True,
            max_steps=BEGINNING_STEPS,
        ),
        Trial(
            name="float64-accumulated",
            words=f"{AS_VECTOR}, of {accumulating.accumulate} micro-batch"
            + ("es" if accumulating.accumulate > 1 else ""),
            config=accumulating,
            reference=BEGINNING,
            in_groups=False,
            is_vector=True,
            max_steps=BEGINNING_STEPS,
        ),
    ]


def without_micro_batches(trial: Trial, config: Config) -> Trial:
    """The trial with as many micro-batches as the settings have."""
    return dataclasses.replace(
        trial, words=AS_VECTOR, config=dataclasses.replace(trial.config, accumulate=config.accumulate)
    )


def lossy_type(config: Config) -> str:
    """The narrowest type in which these settings compute or send gradients."""
    types = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}
    return types.get(config.precision, "float16")


def describe_lossy(config: Config) -> str:
    """The settings that round, as options."""
    options = [f"--precision {config.precision}"] if config.precision.startswith("mixed") else []
    return " ".join([*options, *(["--compression fp16"] if config.compression != "none" else [])])
