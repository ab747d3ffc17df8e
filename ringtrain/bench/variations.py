"""``bench settings``: each rule of ``ringtrain.devices`` against none, by what overrules it.

What the user sets in the environment wins, so that every rule can be undone alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ringtrain.bench.contenders import Comparison, Contender, Experiment
from ringtrain.bench.outcomes import read_training
from ringtrain.bench.steps import LENGTHS, NO_FUSION, Length, plan_one_process, plan_training, workload_flags

VARIATIONS: dict[str, dict[str, str]] = {
    "cycle_5_ms": {"HOROVOD_CYCLE_TIME": "5"},
    "cycle_0.5_ms": {"HOROVOD_CYCLE_TIME": "0.5"},
    "cycle_0.2_ms": {"HOROVOD_CYCLE_TIME": "0.2"},
    "spinning": {"OMPI_MCA_mpi_yield_when_idle": "0"},
    "inter_op_1": {"TF_NUM_INTEROP_THREADS": "1"},
    "intra_op_2": {"TF_NUM_INTRAOP_THREADS": "2"},
    "no_fusion": NO_FUSION,
    "autotune": {"HOROVOD_AUTOTUNE": "1"},
    "ring": {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"},
    "tcp": {"OMPI_MCA_btl": "self,tcp"},
}
BY_FLAGS: dict[str, list[str]] = {"all_by_horovod": ["--backend", "horovod"]}


def plan_variations(models: Sequence[str], size: int, length: Length | None) -> list[Experiment]:
    """For each model: ringtrain as it is, twice, and with each rule undone."""
    experiments = []
    for model in models:
        chosen = length or LENGTHS[model]
        variations: dict[str, dict[str, str]] = {"ringtrain": {}, "ringtrain_again": {}, **VARIATIONS}
        contenders = tuple(
            plan_variation(name, size, model, chosen, variations.get(name, {}), BY_FLAGS.get(name, []))
            for name in (*variations, *BY_FLAGS)
        )
        experiments.append(
            Experiment(
                name=model,
                unit="a step",
                contenders=contenders,
                comparisons=(
                    Comparison(name="ringtrain_again", other="ringtrain"),
                    *(Comparison(name="ringtrain", other=name) for name in (*VARIATIONS, *BY_FLAGS)),
                ),
                reference=plan_one_process(model, size, chosen),
            )
        )
    return experiments


def plan_variation(
    name: str, size: int, model: str, length: Length, env: Mapping[str, str], flags: Sequence[str]
) -> Contender:
    """ringtrain with variables and flags beside its own."""
    training = plan_training(size, [*workload_flags(model), *flags], length)
    words = [*(f"{key}={value}" for key, value in env.items()), *flags]
    return Contender(
        name=name,
        description=" ".join(words) or "as it is",
        commands=(dataclasses.replace(training, env=env),),
        read=read_training,
    )
