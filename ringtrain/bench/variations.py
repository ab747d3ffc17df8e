"""``bench settings``: each rule of ``ringtrain.runtime.devices`` against none, by what overrules it.

What the user sets in the environment wins, so that every rule can be undone alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ringtrain.bench.contenders import Comparison, Contender, Experiment
from ringtrain.bench.outcomes import read_training
from ringtrain.bench.steps import AUTOTUNE, LENGTHS, NO_FUSION, Length, plan_one_process, plan_training, workload_flags


class Variation(NamedTuple):
    """What is set beside what ringtrain chooses, and what it is compared with."""

    other: str
    env: Mapping[str, str] = {}
    by_horovod: bool = False


BY_HOROVOD = ("--backend", "horovod")
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
    "horovod_fusion_128_mib": Variation(
        "horovod", {"HOROVOD_FUSION_THRESHOLD": str(128 * 1024 * 1024)}, by_horovod=True
    ),
    "horovod_autotune": Variation("horovod", AUTOTUNE, by_horovod=True),
    "horovod_ring": Variation(
        "horovod",
        {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"},
        by_horovod=True,
    ),
    "horovod_tcp": Variation("horovod", {"OMPI_MCA_btl": "self,tcp"}, by_horovod=True),
}
SETTINGS_CONTENDERS = ("ringtrain", *VARIATIONS)


def plan_variations(models: Sequence[str], names: Sequence[str], size: int, length: Length | None) -> list[Experiment]:
    """For each model: ringtrain as it is, and with each rule undone.

    Args:
        names: which of ``SETTINGS_CONTENDERS``; empty: all.
    """
    known = {"ringtrain": Variation("ringtrain"), **VARIATIONS}
    planned = {name: variation for name, variation in known.items() if name in (names or known)}
    experiments = []
    for model in models:
        chosen = length or LENGTHS[model]
        experiments.append(
            Experiment(
                name=model,
                unit="a step",
                contenders=tuple(
                    plan_variation(name, variation, size, model, chosen) for name, variation in planned.items()
                ),
                comparisons=tuple(
                    Comparison(name=name, other=variation.other)
                    if name.endswith("_again")
                    else Comparison(name=variation.other, other=name)
                    for name, variation in VARIATIONS.items()
                    if {name, variation.other} <= planned.keys()
                ),
                reference=plan_one_process(model, size, chosen),
            )
        )
    return experiments


def plan_variation(name: str, variation: Variation, size: int, model: str, length: Length) -> Contender:
    """ringtrain with variables and flags beside its own."""
    flags = BY_HOROVOD if variation.by_horovod else ()
    training = plan_training(size, [*workload_flags(model), *flags], length)
    words = [*(f"{key}={value}" for key, value in variation.env.items()), *flags]
    return Contender(
        name=name,
        description=" ".join(words) or "as it is",
        commands=(dataclasses.replace(training, env=variation.env),),
        read=read_training,
    )
