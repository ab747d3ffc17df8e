"""``bench settings``: each rule of ``ringtrain.devices`` against none, by variables that overrule it.

What the user sets in the environment wins, so that every rule can be undone alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ringtrain.bench.contenders import Comparison, Contender, Experiment
from ringtrain.bench.outcomes import read_training
from ringtrain.bench.steps import LENGTHS, NO_FUSION, Length, plan_one_process, plan_training, workload_flags

VARIATIONS: dict[str, dict[str, str]] = {
    "cycle_5_ms": {"HOROVOD_CYCLE_TIME": "5"},
    "cycle_0.2_ms": {"HOROVOD_CYCLE_TIME": "0.2"},
    "spinning": {"OMPI_MCA_mpi_yield_when_idle": "0"},
    "inter_op_1": {"TF_NUM_INTEROP_THREADS": "1"},
    "intra_op_2": {"TF_NUM_INTRAOP_THREADS": "2"},
    "no_fusion": NO_FUSION,
    "autotune": {"HOROVOD_AUTOTUNE": "1"},
    "ring": {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"},
    "tcp": {"OMPI_MCA_btl": "self,tcp"},
}


def plan_variations(models: Sequence[str], size: int, length: Length | None) -> list[Experiment]:
    """For each model: ringtrain as it is, twice, and with each rule undone."""
    experiments = []
    for model in models:
        chosen = length or LENGTHS[model]
        training = plan_training(size, workload_flags(model), chosen)
        variations: dict[str, dict[str, str]] = {"ringtrain": {}, "ringtrain_again": {}, **VARIATIONS}
        contenders = tuple(
            Contender(
                name=name,
                description=" ".join(f"{key}={value}" for key, value in env.items()) or "as it is",
                commands=(dataclasses.replace(training, env=env),),
                read=read_training,
            )
            for name, env in variations.items()
        )
        experiments.append(
            Experiment(
                name=model,
                unit="a step",
                contenders=contenders,
                comparisons=(
                    Comparison(name="ringtrain_again", other="ringtrain"),
                    *(Comparison(name="ringtrain", other=name) for name in VARIATIONS),
                ),
                reference=plan_one_process(model, size, chosen),
            )
        )
    return experiments
