"""``ringtrain verify``: check that N processes train the same as one.

Each world size trains the same global batches. In float64, weights, slots, losses, evaluation, replicas and the ledger
of samples must agree to 1e-10 after any number of steps; in float32 after one. Other paths, precisions and compression
are separate trials (``verify/trials.py``).

Large terms of a gradient may cancel, as for an attention's key bias. So differences are relative to the largest value
of a tensor's kind (weights, or one kind of slots) in its layer, or to 1e-4 of the model's largest.

Optimizers may amplify such a gradient: Lion takes its sign, Adam divides by its size. So the reference trains again
from weights changed in their last bit. A difference below ``noise_factor`` times the effect is not determined by the
training; such tensors are named, and their gradients compared by accumulating slots and the float32 step of plain SGD.
Losses do not depend on such weights and get little tolerance, which unseeded random numbers exceed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Rounding(NamedTuple):
    tolerance: float  # of the largest value of a tensor's kind in its layer
    epsilon: float  # last bit of a number near 1
    noise_factor: float  # times the measured effect of rounding
    max_loss_noise: float


ROUNDING = {
    "float64": Rounding(1e-10, 2.0**-52, 100.0, 1e-6),
    "float32": Rounding(1e-5, 2.0**-23, 100.0, 1e-3),
    "float16": Rounding(5e-3, 2.0**-10, 4.0, 5e-2),
    "bfloat16": Rounding(3e-2, 2.0**-7, 4.0, 2e-1),
}
MODEL_SHARE = 1e-4  # minimum scale, relative to the model's largest value of a kind
KINDS = {"weights": ("weights/",), "slots": ("slots/", "averages/")}
MIN_COMPARED_ORDER = 20  # samples; fewer may repeat their order by chance
MAX_NAMED_LAYERS = 3
OTHER_SAMPLES = (
    "likely cause: the loss of a sample depends on the other samples of its batch. Tested: the gradients of a batch "
    "are not the sum of those of its halves. A rank sees its own samples alone; give it those of all ranks by "
    "ringtrain.all_gather (docs/workloads.md)."
)
RANDOM_DRAWS = (
    "likely cause: random draws that differ by rank. Tested: the gradients of a batch differ with the random numbers "
    "of two ranks. Draws by normal, truncated_normal, uniform, categorical and dropout of keras.random and tf.random "
    "are made equal for the comparison: draw by these, or only if `training` is true."
)
AUGMENT = (
    "likely cause: the workload's augment(). Tested: without it, the world sizes train the same. What a sample becomes "
    "may depend on the sample and its key only, not on the rank, the batch or other random numbers: draw by the "
    "functions of ringtrain.augment, with the keys."
)
AUGMENT_NEEDED = (
    "not tested as the cause: the workload's augment(), as the training fails without it. What a sample becomes must "
    "depend on the sample and its key only."
)
PARTS = ("-perturbed", "-beginning")  # suffixes of partial records
NEVER_COMPARED = (
    "the speed, and what other devices, their libraries and their compilers (XLA) round",
    "checkpoints, resume and what your own callbacks, summaries and generators do",
)

Record = Mapping[str, npt.NDArray]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    name: str
    difference: float  # the largest, relative to its scale; 0 or 1 for equality checks
    tolerance: float
    where: str = ""  # tensor, step or sample of the largest difference, relative to the tolerance
    undetermined: tuple[str, ...] = ()  # pass only because of rounding

    @property
    def passes(self) -> bool:
        return self.difference <= self.tolerance  # NaN fails


def load_record(path: Path) -> Record:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def measure_noise(run: Record, perturbed: Record | None) -> Record:
    """Return the effect of last-bit changes of the first weights."""
    if perturbed is None:
        return {}
    names = [name for name in run if name.startswith(("weights/", "slots/", "averages/", "losses", "evaluation"))]
    return {name: np.abs(np.subtract(perturbed[name], run[name], dtype=np.float64)) for name in names}


def compare(reference: Record, other: Record, noise: Record) -> list[Comparison]:
    rounding = ROUNDING[str(other["computed_in"])]
    findings = [compare_tensors(name, kinds, reference, other, noise, rounding) for name, kinds in KINDS.items()]
    findings += [compare_series(name, reference, other, noise, rounding) for name in ("losses", "evaluation")]
    findings = [finding for finding in findings if finding.name != "evaluation" or other["evaluation"].size]
    findings += [check_replicas(other), check_ledger(reference, other)]
    return findings + ([check_nonfinite(other)] if "nonfinite" in other else [])


def compare_tensors(
    kind: str, prefixes: tuple[str, ...], reference: Record, other: Record, noise: Record, rounding: Rounding
) -> Comparison:
    """Return the tensor with the largest difference, relative to its tolerance."""
    tolerance = rounding.tolerance
    names = [name for name in reference if name.startswith(prefixes)]
    if names != [name for name in other if name.startswith(prefixes)]:
        return Comparison(
            name=kind, difference=math.inf, tolerance=tolerance, where="the names of the variables differ"
        )
    worst = Comparison(name=kind, difference=0.0, tolerance=tolerance)
    undetermined = []
    for name, scale in find_scales(reference, names).items():
        difference = largest_difference(reference[name], other[name]) / scale
        allowed = allow(rounding, float(np.max(noise.get(name, 0.0), initial=0.0)) / scale)
        path = name.split("/", 1)[1]
        if tolerance < difference <= allowed:
            undetermined.append(path)
        if difference / allowed >= worst.difference / worst.tolerance:
            worst = Comparison(name=kind, difference=difference, tolerance=allowed, where=path)
    return dataclasses.replace(worst, undetermined=tuple(undetermined))


def allow(rounding: Rounding, noise: float, most: float = math.inf) -> float:
    """``most`` bounds what ``noise`` excuses."""
    excused = min(rounding.noise_factor * noise, most) if math.isfinite(noise) else 0.0
    return max(rounding.tolerance, excused)


def find_scales(reference: Record, names: Sequence[str]) -> dict[str, float]:
    weights = {name.split("/", 1)[1].replace("/", "_"): name for name in reference if name.startswith("weights/")}
    places = {name: find_place(name, weights) for name in names}
    of_layers: dict[tuple[str, str], float] = {}
    of_kinds: dict[str, float] = {}
    for name, place in places.items():
        largest = float(np.max(np.abs(reference[name]), initial=0.0))
        of_layers[place] = max(of_layers.get(place, 0.0), largest)
        of_kinds[place[0]] = max(of_kinds.get(place[0], 0.0), largest)
    return {name: max(of_layers[place], MODEL_SHARE * of_kinds[place[0]]) or 1.0 for name, place in places.items()}


def find_place(name: str, weights: Mapping[str, str]) -> tuple[str, str]:
    """Kind and layer, such as (``_momentum``, ``weights/digits/dense``); ``weights``: names by path in slots, such as
    ``digits_dense_kernel``.
    """
    kind, path = name.split("/", 1)
    if kind != "slots":
        return kind, name.rpartition("/")[0]
    mine = max((weight for weight in weights if path.startswith(f"{weight}_")), key=len, default=None)
    return (path, "") if mine is None else (path.removeprefix(mine), weights[mine].rpartition("/")[0])


def compare_series(name: str, reference: Record, other: Record, noise: Record, rounding: Rounding) -> Comparison:
    tolerance = rounding.tolerance
    expected, found = reference[name], other[name]
    if expected.shape != found.shape:
        return Comparison(name=name, difference=math.inf, tolerance=tolerance, where="their numbers differ")
    if not expected.size:
        return Comparison(name=name, difference=0.0, tolerance=tolerance)
    scales = [abs(float(value)) or 1.0 for value in expected]
    differences = [largest_difference(a, b) / scale for a, b, scale in zip(expected, found, scales, strict=True)]
    moved = float(np.max(noise.get(name, 0.0) / np.array(scales)))
    allowed = allow(rounding, moved, rounding.max_loss_noise if name == "losses" else math.inf)
    worst = int(np.argmax(differences))
    where = f"step {worst + 1}" if name == "losses" else f"value {worst + 1}"
    if differences[worst] > allowed and rounding.noise_factor * moved > allowed:
        where += f"; the run itself moves by {moved:.1e} when its first weights change in their last bit."
        if rounding is ROUNDING["float64"]:  # narrower types: may be rounding
            where += " Its random numbers have no seed, or its learning rate is too high."
    undetermined = (name,) if tolerance < differences[worst] <= allowed else ()
    return Comparison(
        name=name, difference=differences[worst], tolerance=allowed, where=where, undetermined=undetermined
    )


def check_replicas(record: Record) -> Comparison:
    digests = record["replicas"]  # [ranks, variables]
    differing = np.argwhere(digests != digests[0])
    where = "".join(f"rank {rank}, {record['variables'][variable]}" for rank, variable in differing[:1])
    return Comparison(name="replicas", difference=float(bool(where)), tolerance=0.0, where=where)


def check_ledger(reference: Record, other: Record) -> Comparison:
    """Check that steps have the reference's samples, each once per epoch and evaluation, in new orders.

    Positions are compared if samples have no numbers (``num_samples`` is 0).
    """
    where, num_samples = "", int(reference["num_samples"])
    first: list[int] = []
    seen: list[int] = []
    for step, (expected, samples) in enumerate(zip(split_steps(reference), split_steps(other), strict=True)):
        if step % int(reference["steps_per_epoch"]) == 0:
            first, seen = first or seen, []
        seen += samples.tolist()
        if sorted(expected) != sorted(samples):
            where = where or f"step {step + 1} had other samples"
        if len(samples) > int(other["global_batch_size"]):
            where = where or f"step {step + 1} had {len(samples)} samples"
        if len(set(seen)) != len(seen):
            where = where or f"step {step + 1} had a sample that its epoch had before"
        if num_samples and len(seen) >= MIN_COMPARED_ORDER and seen == first[: len(seen)]:
            where = where or f"the epoch of step {step + 1} had the order of the first"
        if (step + 1) % int(reference["steps_per_epoch"]) == 0 and len(seen) != num_samples > 0:
            where = where or f"the epoch that ends with step {step + 1} had {len(seen)} samples"
    planned = int(other.get("num_evaluated", -1))
    if planned >= 0 and other["evaluation"].size and int(other["evaluation"][0]) != planned:
        where = where or f"the evaluation counted {int(other['evaluation'][0])} of {planned} samples"
    return Comparison(name="ledger", difference=float(bool(where)), tolerance=0.0, where=where)


def check_nonfinite(record: Record) -> Comparison:
    """A step that is non-finite on one rank must change nothing on any."""
    where = next(iter(record["nonfinite"].tolist()), "")
    return Comparison(name="nonfinite", difference=float(bool(where)), tolerance=0.0, where=where)


def split_steps(record: Record) -> list[npt.NDArray]:
    return np.split(record["samples"], np.cumsum(record["samples_per_step"])[:-1])


def largest_difference(reference: npt.NDArray, other: npt.NDArray) -> float:
    """Return infinity if a difference is not finite."""
    largest = float(np.max(np.abs(np.subtract(other, reference, dtype=np.float64)), initial=0.0))
    return largest if math.isfinite(largest) else math.inf


def compare_trials(of_reference: Mapping[str, Record], of_other: Mapping[str, Record]) -> dict[str, list[Comparison]]:
    found = {}
    for name, record in of_other.items():
        if name.endswith(PARTS) or "skipped" in record:
            continue
        reference = str(record["reference"])
        noise = measure_noise(of_reference[reference], of_reference.get(f"{reference}-perturbed"))
        found[name] = compare(of_reference[reference], record, noise)
    return found


def describe_findings(sizes: Sequence[int], records: Mapping[int, Mapping[str, Record]]) -> tuple[list[str], bool]:
    reference_size, *others = sizes
    of_reference, of_first = records[reference_size], records[others[0]]
    found = {size: compare_trials(of_reference, records[size]) for size in others}
    lines, passed = [], True
    for name in found[others[0]]:
        tables = {f"{size} against {reference_size}": found[size][name] for size in others}
        tables[str(reference_size)] = [check for check in check_alone(of_reference.get(name, {})) if not check.passes]
        lines.append(
            f"{describe_trial(of_first[name])}; largest difference, relative to the largest value in its layer:"
        )
        for which, findings in tables.items():
            lines += describe_all(which, findings)
            passed = passed and all(finding.passes for finding in findings)
    if not passed and of_reference["float64"].get("draws_by_rank", False):
        lines.insert(0, RANDOM_DRAWS)
    elif not passed and of_reference["float64"].get("depends_on_other_samples", False):
        lines.insert(0, OTHER_SAMPLES)
    skipped = [f"{record['words']}: {record['skipped']}" for record in of_first.values() if "skipped" in record]
    notes = [*of_reference["float64"]["notes"].tolist(), *skipped]
    lines += ["compared:", *(f"  {describe_trial(of_first[name])}" for name in found[others[0]])]
    return [*lines, "not compared:", *(f"  {note}" for note in [*fold_notes(notes), *NEVER_COMPARED])], passed


def check_alone(record: Record) -> list[Comparison]:
    if not record:
        return []
    return [check_ledger(record, record), *([check_nonfinite(record)] if "nonfinite" in record else [])]


def describe_oracle(records: Mapping[str, Record]) -> tuple[list[str], bool]:
    plain, mine = records["plain"], records["float64"]
    noise = measure_noise(mine, records.get("float64-perturbed"))
    findings = compare(plain, mine, noise)
    lines = [f"{describe_trial(mine)}, against plain Keras:", *describe_all("1 against plain Keras", findings)]
    return lines, all(finding.passes for finding in findings)


def describe_trial(record: Record) -> str:
    steps = len(record["losses"])
    return f"{steps} step{'s' if steps > 1 else ''}, {record['words']}"


def describe_all(which: str, findings: Sequence[Comparison]) -> list[str]:
    lines = [f"  {which}: {describe_finding(finding)}" for finding in findings]
    names = [name for finding in findings for name in finding.undetermined]
    if names:
        more = f" and {len(names) - MAX_NAMED_LAYERS} more" if len(names) > MAX_NAMED_LAYERS else ""
        lines.append(
            f"  {which}: rounding alone moves {', '.join(names[:MAX_NAMED_LAYERS])}{more} as far: the training does "
            "not determine their values, only their gradients"
        )
    return lines


def fold_notes(notes: Sequence[str]) -> list[str]:
    """Merge notes ``LAYER: TEXT`` with equal text."""
    layers: dict[str, list[str]] = {}
    for note in notes:
        layer, _, text = note.partition(": ")
        layers.setdefault(text, []).append(layer)
    return [
        f"{', '.join(names[:MAX_NAMED_LAYERS])}"
        f"{f' and {len(names) - MAX_NAMED_LAYERS} more layers' if len(names) > MAX_NAMED_LAYERS else ''}: {text}"
        for text, names in layers.items()
    ]


def describe_finding(finding: Comparison) -> str:
    verdict = "ok" if finding.passes else "DIFFERS"
    value = f"{finding.difference:.1e}, at most {finding.tolerance:.0e}" if finding.tolerance else ""
    return f"{finding.name:<10} {verdict:<8} {value:<23} {finding.where}".rstrip()
