"""Causes of differences between the ranks' step and that of one process, in words."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringtrain.messages.ranks import name_ranks
from ringtrain.messages.rules import list_first

Facts = Sequence[Mapping[str, Any]]  # of each rank, by ``compare``
TOLERANCE, HALF_TOLERANCE = 1e-4, 3e-2  # relative; of half-precision values or messages
NOISE_FACTOR, MAX_NOISE = 10.0, 1e-2  # times what another order of the samples changes; random numbers exceed it
MANY_DUPLICATES = 0.2  # of a batch
MAX_NAMED = 3
NO_GRADIENT = 1e-6  # of the longest
CLIPPED = "clipped before the reduction"
COMPARED = {"gradient": "gradients", "update": "updates", "state": "state of layers"}


class Cause(NamedTuple):
    name: str  # short, for programs
    words: str
    is_wrong: bool = True


class Difference(NamedTuple):
    """Difference of a variable, relative to the right value."""

    kind: str
    value: float
    tolerance: float
    position: int  # of the variable
    name: str

    @property
    def passes(self) -> bool:
        return self.value <= self.tolerance


def find_differences(facts: Facts) -> list[Difference]:
    """Return the largest of each kind, relative to its tolerance."""
    kinds = [list(differences_of(facts, kind)) for kind in COMPARED]
    return [max(of_kind, key=lambda each: each.value / each.tolerance) for of_kind in kinds if of_kind]


def differences_of(facts: Facts, kind: str) -> Iterator[Difference]:
    most = MAX_NOISE if kind == "gradient" else np.inf  # an optimizer may amplify rounding
    for its in facts:
        for index, row in enumerate(its["state" if kind == "state" else "variables"]):
            allowed = max(tolerance_of(facts), min(NOISE_FACTOR * row[f"{kind}_rounding"], most))
            yield Difference(COMPARED[kind], row[kind], allowed, index, row["name"])


def tolerance_of(facts: Facts) -> float:
    return HALF_TOLERANCE if any(its["half"] or its["compression"] for its in facts) else TOLERANCE


def find_causes(facts: Facts) -> list[Cause]:
    """Return the causes that the facts show, most likely first; those of a right step are notes."""
    wrong = sorted({each.position for each in differences_of(facts, "gradient") if not each.passes})
    causes = [*of_samples(facts), *of_reduction(facts, wrong)]
    # Each further test supposes that the earlier ones have found nothing.
    for find in (of_rates, of_starts, of_weights, of_samples_of_others, of_unknown, of_loss):
        if not any(cause.is_wrong for cause in causes):
            causes += find(facts, wrong)
    if facts[0]["compression"]:
        causes.append(Cause("compression", "Gradients are sent as float16: about 3 decimal digits.", is_wrong=False))
    return causes


def of_samples(facts: Facts) -> Iterator[Cause]:
    counts = collections.Counter(sample for its in facts for sample in set(its["samples"]))
    own = [len(set(its["samples"])) / max(its["count"], 1) for its in facts]
    num_shared = sum(count > 1 for count in counts.values())
    if not num_shared or min(own) <= 1 - MANY_DUPLICATES:  # the data repeat themselves
        return
    if num_shared / len(counts) < MANY_DUPLICATES:
        words = f"{num_shared} of {len(counts)} samples are on several ranks, which may shuffle the same data."
        yield Cause("some same samples", words, is_wrong=False)
        return
    yield Cause(
        "same samples",
        f"Ranks train on the same samples: {num_shared / len(counts):.0%} of those of this step are on several ranks. "
        "Give each rank its own, such as by dataset.shard(hvd.size(), hvd.rank()) before shuffle and batch.",
    )


def of_reduction(facts: Facts, wrong: Sequence[int]) -> Iterator[Cause]:
    updates = [its["num_updates"] for its in facts]
    if idle := [rank for rank, number in enumerate(updates) if number < max(updates)]:
        yield Cause(
            "updates on some ranks",
            f"The optimizer updates no weights on {name_ranks(idle)}. Apply the reduced gradients on every rank.",
        )
        return
    rows = [its["variables"] for its in facts]
    left = [index for index in wrong if not all(of_rank[index]["is_reduced"] for of_rank in rows)]
    optimizers = sorted({name for its in facts for name in its["not_distributed"]})
    if left and optimizers:
        yield Cause(
            "optimizer not distributed",
            f"The optimizer {', '.join(optimizers)} applies gradients that are not reduced ({_names(facts, left)}). "
            "Wrap it: hvd.DistributedOptimizer(optimizer), or take its gradients from hvd.DistributedGradientTape.",
        )
    elif left:
        yield Cause(
            "not reduced",
            f"The gradients of {_names(facts, left)} are not reduced. Pass them to the distributed optimizer or tape "
            "together with the others.",
        )
    rest = [index for index in wrong if index not in left]
    if different := [index for index in rest if len({of_rank[index]["bits"] for of_rank in rows}) > 1]:
        yield Cause(
            "different gradients",
            f"The ranks apply different gradients of {_names(facts, different)}: they were changed after the "
            "reduction, or only some ranks reduced them.",
        )


def of_rates(facts: Facts, wrong: Sequence[int]) -> Iterator[Cause]:
    rates = [its["rates"] for its in facts]
    if len(set(map(str, rates))) > 1:
        listed = ", ".join(f"rank {rank}: {', '.join(map(str, its))}" for rank, its in enumerate(rates))
        yield Cause("different rates", f"The ranks have different learning rates ({listed}). Set the same on each.")


def of_starts(facts: Facts, wrong: Sequence[int]) -> Iterator[Cause]:
    if len({tuple(its["begin"]) for its in facts}) > 1:
        yield Cause(
            "different weights",
            "The ranks have different weights before the step. Start from the same ones: "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(0), or in a custom loop hvd.broadcast_variables after the "
            "first step.",
        )


def of_weights(facts: Facts, wrong: Sequence[int]) -> Iterator[Cause]:
    """Find wrong factors of the ranks' gradients."""
    size, counts = len(facts), [its["count"] for its in facts]
    found = [facts[0]["variables"][index] for index in wrong if facts[0]["variables"][index]["is_reduced"]]
    factor = float(np.median([each["factor"] for each in found])) if found else 1.0
    if abs(factor / size - 1) < 0.1:
        yield Cause(
            "summed",
            f"Gradients are {size} times those of one process: they are summed, and the loss is a mean over a rank's "
            "samples. Leave out op=hvd.Sum, or divide the loss by hvd.size() in the step. If the script divides it by "
            "a value of hvd.size() that it read before, it is right; the audit cannot detect that.",
        )
    elif abs(factor * size - 1) < 0.1:
        yield Cause(
            "divided twice",
            f"Gradients are 1/{size} of those of one process: the loss or the gradients are divided by the number of "
            "ranks, and hvd.Average divides again. Divide once.",
        )
    if found and len(set(counts)) > 1 and max(each["of_mean"] for each in found) <= 10 * tolerance_of(facts):
        smallest = counts.index(min(counts))
        yield Cause(
            "uneven batches",
            f"The ranks have batches of {', '.join(map(str, counts))} samples, whose means count equally: a sample of "
            f"{name_ranks([smallest])} counts {sum(counts) / size / min(counts):.2g} times. Give the ranks batches of "
            "equal size (drop_remainder=True), or weight the loss by the number of samples.",
        )


def of_samples_of_others(facts: Facts, wrong: Sequence[int]) -> Iterator[Cause]:
    norms = facts[0]["norms"]
    if wrong and norms and max(its["without_norms"] for its in facts) <= 10 * tolerance_of(facts):
        moved = max((row["state"] for its in facts for row in its["state"]), default=0.0)
        yield Cause(
            "local BatchNorm",
            f"BatchNormalization ({list_first(norms, MAX_NAMED)}) normalises by each rank's samples alone; its moving "
            f"statistics are {moved:.2g} away from those of the whole batch. hvd.SyncBatchNormalization takes those of "
            "all ranks.",
        )
        return
    most_weighted = max((facts[0]["variables"][index]["of_weighted"] for index in wrong), default=0.0)
    if most_weighted <= tolerance_of(facts):
        return
    if without := ranks_without_gradient(facts):
        yield Cause(
            CLIPPED,
            f"The loss has no gradient {' and '.join(without)}, and has one elsewhere: it was clipped before the "
            "reduction, when it was the mean over a rank's samples. Clip the loss of each sample, before the mean.",
        )
    elif max(facts[0]["variables"][index]["of_raw"] for index in wrong) <= tolerance_of(facts):
        yield Cause(
            CLIPPED,
            f"The gradients of {_names(facts, wrong)} were clipped, or changed in another way that is not linear, "
            "before the reduction. Those that the tape computed agree in the mean over the ranks' samples. Clip the "
            "reduced gradients: by global_clipnorm=, clipnorm= or clipvalue= of the optimizer, or those that "
            "hvd.DistributedGradientTape returns.",
        )
    else:
        yield Cause(
            "loss across samples",
            "The gradient of the whole batch is not the mean of those of the ranks' samples: the loss of a sample "
            "depends on others, or it is divided by something else than the number of samples, such as a sum of "
            "weights or of masks. Divide by the number of samples; ringtrain.all_gather gives samples of all ranks.",
        )


def ranks_without_gradient(facts: Facts) -> list[str]:
    """Return where all gradients are zero, in words; nothing if they are zero everywhere or nowhere."""
    norms = [its["local_norm"] for its in facts]
    right_norm = facts[0]["right_norm"]
    smallest = NO_GRADIENT * max(*norms, right_norm)
    idle = [rank for rank, norm in enumerate(norms) if norm <= smallest]
    where = [f"on {name_ranks(idle)}"] if idle else []
    if right_norm <= smallest:
        where.append("in one process")
    is_everywhere = len(idle) == len(norms) and right_norm <= smallest
    return [] if is_everywhere else where


def of_unknown(facts: Facts, wrong: Sequence[int]) -> Iterator[Cause]:
    if any(not each.passes for each in find_differences(facts)):
        where = f" of {_names(facts, wrong)}" if wrong else ""
        yield Cause("unknown", f"The values{where} differ from those of one process; the cause is unknown.")


def of_loss(facts: Facts, wrong: Sequence[int]) -> Iterator[Cause]:
    losses = [its["losses"] for its in facts]
    if any(None in of_rank for of_rank in losses):
        return
    mean, right = float(np.mean([mine for mine, _ in losses])), losses[0][1]
    if abs(mean - right) > 10 * tolerance_of(facts) * max(abs(right), abs(mean)):
        words = f"The loss is {mean:.6g} in the mean over ranks, and {right:.6g} in one process; weights do not differ."
        yield Cause("logged loss", words, is_wrong=False)


def _names(facts: Facts, indices: Sequence[int]) -> str:
    return list_first([facts[0]["variables"][index]["name"] for index in indices], MAX_NAMED)
