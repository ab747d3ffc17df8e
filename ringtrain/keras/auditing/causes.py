"""Causes of differences between the ranks' step and that of one process, in words."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringtrain.messages.ranks import name_ranks

Facts = Sequence[Mapping[str, Any]]  # of each rank, by ``audit_step``
TOLERANCE, HALF_TOLERANCE = 1e-4, 3e-2  # relative; of half-precision values or messages
NOISE_FACTOR, MAX_NOISE = 10.0, 1e-2  # times what another order of the samples changes; random numbers exceed it
SAME = 1e-3  # relative; values that are taken as equal
MANY_DUPLICATES = 0.2  # of a batch
MAX_NAMED = 3
COMPARED = {"difference": "gradients", "update": "updates", "state": "state of layers"}


class Cause(NamedTuple):
    name: str  # short, for programs
    words: str
    is_wrong: bool = True


class Difference(NamedTuple):
    """Largest difference of a kind over all ranks, relative to the right value."""

    kind: str
    value: float
    tolerance: float
    where: str

    @property
    def passes(self) -> bool:
        return self.value <= self.tolerance  # NaN fails


def find_differences(facts: Facts) -> list[Difference]:
    return [
        max((each for each in of_kind), key=lambda each: each.value / each.tolerance)
        for kind in COMPARED
        if (of_kind := list(differences_of(facts, kind)))
    ]


def differences_of(facts: Facts, kind: str) -> Iterator[Difference]:
    least = HALF_TOLERANCE if any(its["half"] or its["compression"] for its in facts) else TOLERANCE
    for its in facts:
        if kind == "state":
            pairs = [(name, value, 0.0) for name, value in its["state"].items()]
        else:
            pairs = [(each["name"], each[kind], each["rounding"]) for each in its["variables"] if not each["is_own"]]
        for name, value, noise in pairs:
            yield Difference(COMPARED[kind], value, max(least, min(NOISE_FACTOR * noise, MAX_NOISE)), name)


def find_causes(facts: Facts) -> list[Cause]:
    """Return the causes that the facts show, most likely first; empty for a right step."""
    wrong = [each for each in differences_of(facts, "difference") if not each.passes]
    names = list(dict.fromkeys(each.where for each in wrong))
    causes = [*of_samples(facts), *of_repetition(facts), *of_reduction(facts, set(names)), *of_rates(facts)]
    # Each further test supposes that the earlier ones have found nothing.
    further: list[Callable[[Facts], Iterator[Cause]]] = [of_starts, functools.partial(of_weights, names=set(names))]
    for find in [*further, *([of_loss] if names else [])]:
        if not any(cause.is_wrong for cause in causes):
            causes += find(facts)
    if facts[0]["compression"]:
        causes.append(Cause("compression", "Gradients are sent as float16, which has 3 digits.", is_wrong=False))
    if not causes and any(not each.passes for each in find_differences(facts)):
        where = f" of {', '.join(names[:MAX_NAMED])}" if names else ""
        causes.append(
            Cause("unknown", f"The values{where} differ from those of one process, for no reason known here.")
        )
    return causes


def of_samples(facts: Facts) -> Iterator[Cause]:
    counts = collections.Counter(sample for its in facts for sample in set(its["samples"]))
    own = [len(set(its["samples"])) / max(its["count"], 1) for its in facts]
    shared = sum(count > 1 for count in counts.values()) / max(len(counts), 1)
    if shared and min(own) > 1 - MANY_DUPLICATES:
        yield Cause(
            "same samples",
            f"Ranks train on the same samples: {shared:.0%} of the samples of this step are on several ranks. Give "
            "each rank its own, such as by dataset.shard(hvd.size(), hvd.rank()) before shuffle and batch.",
            is_wrong=shared >= MANY_DUPLICATES,  # else each shuffles the same data
        )


def of_starts(facts: Facts) -> Iterator[Cause]:
    if len({tuple(its["begin"]) for its in facts}) > 1:
        yield Cause(
            "different weights",
            "The ranks have different weights before the step. Start from the same ones: "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(0), or in a loop of your own hvd.broadcast_variables after "
            "the first step.",
        )


def of_repetition(facts: Facts) -> Iterator[Cause]:
    if (changed := max(its["repeated"] for its in facts)) > 0:
        yield Cause(
            "not deterministic",
            f"The same step gives other gradients (by {changed:.0e}) when it runs again, in one process: it draws "
            "random numbers outside of Keras' seed generators, or an operation is not deterministic. Try "
            "tf.config.experimental.enable_op_determinism().",
            is_wrong=changed > SAME,
        )


def of_reduction(facts: Facts, names: set[str]) -> Iterator[Cause]:
    updates = [its["num_updates"] for its in facts]
    if idle := [rank for rank, number in enumerate(updates) if number < max(updates)]:
        yield Cause(
            "updates on some ranks",
            f"The optimizer updates no weights on {name_ranks(idle)}. Apply the reduced gradients on every rank.",
        )
    found = [each for its in facts for each in its["variables"] if each["name"] in names and not each["is_own"]]
    left = list(dict.fromkeys(each["name"] for each in found if not each["is_reduced"]))
    if alone := sorted({name for its in facts for name in its["alone"]}):
        yield Cause(
            "optimizer not distributed",
            f"The optimizer {', '.join(alone)} gets gradients that no reduction touched "
            f"({_list(left)}). Wrap it: hvd.DistributedOptimizer(optimizer), or take its gradients from "
            "hvd.DistributedGradientTape.",
        )
    elif left:
        yield Cause(
            "not reduced",
            f"No reduction touched the gradients of {_list(left)}. Pass them to the distributed optimizer or tape "
            "together with the others.",
        )
    rest = [each for each in found if each["is_reduced"]]
    different = [name for name in names if len({each["gradient"] for each in rest if each["name"] == name}) > 1]
    if different:
        yield Cause(
            "different gradients",
            f"The ranks apply different gradients of {_list(sorted(different))}: they were changed after the "
            "reduction, or only some ranks reduced them.",
        )


def of_weights(facts: Facts, names: set[str]) -> Iterator[Cause]:
    """Wrong factors of the ranks' gradients."""
    size, counts = len(facts), [its["count"] for its in facts]
    found = [each for each in facts[0]["variables"] if each["name"] in names and each["is_reduced"]]
    if not found:
        return
    factor = float(np.median([each["factor"] for each in found]))
    if size > 1 and abs(factor / size - 1) < 0.1:
        yield Cause(
            "summed",
            f"Gradients are {size} times those of one process: they are summed, and the loss is a mean over a rank's "
            "samples. Leave out op=hvd.Sum, or divide the loss by the number of ranks.",
        )
    elif size > 1 and abs(factor * size - 1) < 0.1:
        yield Cause(
            "divided twice",
            f"Gradients are 1/{size} of those of one process: the loss or the gradients are divided by the number of "
            "ranks, and hvd.Average divides again. Divide once.",
        )
    if len(set(counts)) > 1 and max(each["of_mean"] for each in found) <= SAME:
        smallest = counts.index(min(counts))
        yield Cause(
            "uneven batches",
            f"The ranks have batches of {', '.join(map(str, counts))} samples, whose means count equally: a sample of "
            f"{name_ranks([smallest])} counts {sum(counts) / size / max(min(counts), 1):.2g} times. Give the ranks "
            "batches of one size (drop_remainder=True), or weigh the loss by the number of samples.",
        )


def of_loss(facts: Facts) -> Iterator[Cause]:
    norms = facts[0]["norms"]
    if norms and max(its["without_norms"] for its in facts) <= SAME:
        moved = max((value for its in facts for value in its["state"].values()), default=0.0)
        yield Cause(
            "local BatchNorm",
            f"BatchNormalization ({_list(norms)}) normalises by each rank's samples alone; its moving statistics are "
            f"{moved:.2g} away from those of the whole batch. hvd.SyncBatchNormalization takes those of all ranks.",
        )
    elif max(each["of_weighted"] for each in facts[0]["variables"]) > TOLERANCE:
        yield Cause(
            "loss across samples",
            "The gradient of the whole batch is not the mean of those of the ranks' samples: the loss of a sample "
            "depends on others, or it is divided by something else than the number of samples, such as a sum of "
            "weights or of masks. Divide by the number of samples; ringtrain.all_gather gives samples of all ranks.",
        )


def of_rates(facts: Facts) -> Iterator[Cause]:
    rates = [tuple(its["rates"]) for its in facts]
    if len(set(rates)) > 1:
        listed = ", ".join(f"rank {rank}: {its[0] if its else None}" for rank, its in enumerate(rates))
        yield Cause("different rates", f"The ranks have different learning rates ({listed}). Set the same on each.")


def notes_of(facts: Facts) -> list[str]:
    """Return what differs by design, or was not compared."""
    notes = []
    if drawing := facts[0]["drawing"]:
        notes.append(f"dropout and noise ({_list(drawing)}): the draws differ by rank; compared without them")
    losses = [its["losses"] for its in facts]
    if all(None not in pair for pair in losses):
        counts = [its["count"] for its in facts]
        mean = float(np.average([ranks for ranks, _ in losses], weights=counts))
        notes.append(
            f"loss: {losses[0][1]:.6g} of the whole batch; the ranks' mean is {mean:.6g}, and rank 0's own "
            f"{losses[0][0]:.6g}"
        )
    return notes


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
