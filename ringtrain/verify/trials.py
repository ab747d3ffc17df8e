"""The trainings that ``verify`` compares.

Paths depend on hardware: gradients in one sum or in groups, updates sharded or not. All are tried everywhere.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ringtrain.config import Config

BEGINNING = "float64-beginning"  # record of the reference's first float64 steps
BEGINNING_STEPS = 2
OWN = "own"
AS_VECTOR = "gradients as one vector"
MICRO_BATCHES = "micro-batches"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of the workload."""

    name: str  # of its record
    words: str  # difference from other trials
    config: Config
    reference: str  # record to compare with
    in_groups: bool | None = None  # of the reduction
    is_vector: bool = False  # reduce gradients as one vector, as backends without lists do
    is_plain: bool = False  # use plain SGD: Adam would divide by gradients that are only rounding
    max_steps: int | None = None  # the learning rate is that of a full run
    lossy: str = ""  # the run's options that lose precision, not used here

    @property
    def is_lossy(self) -> bool:
        return self.name == OWN


def plan_trials(config: Config, *, is_reference: bool) -> list[Trial]:
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
    return dataclasses.replace(
        trial, words=AS_VECTOR, config=dataclasses.replace(trial.config, accumulate=config.accumulate)
    )


def lossy_type(config: Config) -> str:
    return "bfloat16" if config.precision == "mixed_bfloat16" or config.compression == "bf16" else "float16"


def describe_lossy(config: Config) -> str:
    options = [f"--precision {config.precision}"] if config.precision.startswith("mixed") else []
    return " ".join([*options, *([f"--compression {config.compression}"] if config.compression != "none" else [])])
