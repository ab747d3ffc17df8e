"""``ringtrain verify``: do N processes train what one process trains?

Trains the same global batches under each world size, in processes that it starts itself, and compares what came of it:
weights, optimizer slots, losses, evaluation, the replicas of each run with one another, and the ledger of samples.
In float64 all of it must agree to 1e-10 after any number of steps; in float32, whose rounding grows without bound along
a trajectory, one step from the same weights is compared.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from ringtrain.errors import EXIT_CODES, ReplicasDifferError, RingtrainError, UsageError

DEFAULT_STEPS = 20
DEFAULT_GLOBAL_BATCH_SIZE = 100
FLOAT64_TOLERANCE = 1e-10  # of each tensor's largest value
FLOAT32_TOLERANCE = 1e-5
RUN_TIMEOUT_SECONDS = 1800
MAX_NAMED_LAYERS = 3

Record = Mapping[str, npt.NDArray]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One comparison of a run with the reference.

    Attributes:
        name: what was compared.
        difference: the largest difference relative to the largest value of its tensor; 0 or 1 for what is equal or not.
        tolerance: the largest difference that passes.
        where: which tensor, step or sample holds the largest difference.
    """

    name: str
    difference: float
    tolerance: float
    where: str = ""

    @property
    def passes(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.difference <= self.tolerance  # False for NaN as well


def plan_command(size: int, arguments: Sequence[str], *, mpirun: str | None, horovodrun: str | None) -> list[str]:
    """The command line of a group of ``size`` processes.

    Args:
        arguments: of ``python -m ringtrain``.
        mpirun, horovodrun: the launchers' paths, or None where there is none.

    Raises:
        UsageError: more than one process, and no launcher.
    """
    program = [sys.executable, "-m", "ringtrain", *arguments]
    if size == 1:
        return program
    if mpirun:
        return [mpirun, "-np", str(size), "--oversubscribe", "--bind-to", "none", *program]
    if horovodrun:
        return [horovodrun, "--gloo", "-np", str(size), *program]
    raise UsageError(
        f"a world size of {size} needs mpirun or horovodrun, and neither is in PATH. Run `make setup`, or activate the "
        "environment that holds them."
    )


def run_group(size: int, arguments: Sequence[str], directory: Path) -> None:
    """Train under one world size; its record is in ``directory`` afterwards.

    Raises:
        RingtrainError: the group failed; its own words are in the message.
    """
    command = plan_command(size, arguments, mpirun=shutil.which("mpirun"), horovodrun=shutil.which("horovodrun"))
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=RUN_TIMEOUT_SECONDS)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGTERM)  # mpirun takes its ranks along
        process.wait(timeout=30)
        if isinstance(error, subprocess.TimeoutExpired):
            raise RingtrainError(f"{size} processes were not done after {RUN_TIMEOUT_SECONDS} s.") from None
        raise
    if process.returncode:
        failed = f"training with {size} processes failed with exit code {process.returncode}:"
        raise EXIT_CODES.get(process.returncode, RingtrainError)(
            "\n  ".join([failed, *output.strip().split("\n")]), reach="run"
        )


def load_record(path: Path) -> Record:
    """The arrays of a run that ``ringtrain.record`` wrote."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def compare(reference: Record, other: Record, *, precision: Literal["float64", "float32"]) -> list[Finding]:
    """Hold a run against the reference run, which trained the same under another world size."""
    tolerance = FLOAT64_TOLERANCE if precision == "float64" else FLOAT32_TOLERANCE
    findings = [compare_tensors(kind, reference, other, tolerance) for kind in ("weights", "slots")]
    for name in ("losses", "evaluation"):
        findings.append(compare_series(name, reference[name], other[name], tolerance))
    return [*findings, check_replicas(other), check_ledger(reference, other)]


def compare_tensors(kind: str, reference: Record, other: Record, tolerance: float) -> Finding:
    """The largest difference of a tensor, relative to the largest value of that tensor in the reference."""
    names = [name for name in reference if name.startswith(f"{kind}/")]
    if names != [name for name in other if name.startswith(f"{kind}/")]:
        return Finding(
            name=kind, difference=float("inf"), tolerance=tolerance, where="the names of the variables differ"
        )
    worst = Finding(name=kind, difference=0.0, tolerance=tolerance)
    for name in names:
        difference = relative_difference(reference[name], other[name])
        if not difference <= worst.difference:
            worst = Finding(name=kind, difference=difference, tolerance=tolerance, where=name.split("/", 2)[2])
    return worst


def compare_series(name: str, reference: npt.NDArray, other: npt.NDArray, tolerance: float) -> Finding:
    """The largest relative difference of two series of numbers, such as losses."""
    if reference.shape != other.shape:
        return Finding(name=name, difference=float("inf"), tolerance=tolerance, where="their numbers differ")
    differences = [relative_difference(a, b) for a, b in zip(reference, other, strict=True)]
    worst = int(np.argmax(differences)) if differences else 0
    where = f"step {worst + 1}" if name == "losses" else f"value {worst + 1}"
    return Finding(name=name, difference=max(differences, default=0.0), tolerance=tolerance, where=where)


def check_replicas(record: Record) -> Finding:
    """Whether all ranks of one run ended with the same bits."""
    digests = record["replicas"]  # [ranks, variables]
    differing = np.argwhere(digests != digests[0])
    where = ""
    if differing.size:
        rank, variable = differing[0]
        where = f"rank {rank}, {record['variables'][variable]}"
    return Finding(name="replicas", difference=float(bool(differing.size)), tolerance=0.0, where=where)


def check_ledger(reference: Record, other: Record) -> Finding:
    """Whether each step had the reference's samples, and each sample came once in an epoch."""
    where = ""
    seen: list[int] = []
    for step, (expected, samples) in enumerate(zip(split_steps(reference), split_steps(other), strict=True)):
        if step % int(reference["steps_per_epoch"]) == 0:
            seen = []
        seen += samples.tolist()
        if sorted(expected) != sorted(samples):
            where = where or f"step {step + 1} had other samples"
        if len(set(seen)) != len(seen):
            where = where or f"step {step + 1} had a sample that its epoch had before"
        if (step + 1) % int(reference["steps_per_epoch"]) == 0 and len(seen) != int(reference["num_samples"]):
            where = where or f"the epoch that ends with step {step + 1} had {len(seen)} samples"
    return Finding(name="ledger", difference=float(bool(where)), tolerance=0.0, where=where)


def split_steps(record: Record) -> list[npt.NDArray]:
    """The samples of each step."""
    return np.split(record["samples"], np.cumsum(record["samples_per_step"])[:-1])


def relative_difference(reference: npt.NDArray, other: npt.NDArray) -> float:
    """The largest difference, relative to the reference's largest value where that is not 0."""
    if not np.size(reference):
        return 0.0
    largest = float(np.max(np.abs(reference)))
    return float(np.max(np.abs(np.subtract(other, reference, dtype=np.float64)))) / (largest or 1.0)


def describe_findings(sizes: Sequence[int], records: Mapping[int, Mapping[str, Record]]) -> tuple[list[str], bool]:
    """The report of all comparisons, and whether all passed."""
    reference_size, *others = sizes
    lines, passed = [], True
    lines += [f"  not compared: {note}" for note in fold_notes(records[reference_size]["float64"]["notes"].tolist())]
    for precision in ("float64", "float32"):
        reference = records[reference_size][precision]
        steps = len(reference["losses"])
        lines.append(
            f"{precision}, {steps} step{'s' if steps > 1 else ''}; largest difference of a tensor's largest value:"
        )
        for size in others:
            findings = compare(reference, records[size][precision], precision=precision)
            passed = passed and all(finding.passes for finding in findings)
            lines += [f"  {size} against {reference_size}: {describe_finding(finding)}" for finding in findings]
        ledger = check_ledger(reference, reference)
        passed = passed and ledger.passes
        lines += [] if ledger.passes else [f"  {reference_size}: {describe_finding(ledger)}"]
    return lines, passed


def fold_notes(notes: Sequence[str]) -> list[str]:
    """Notes, ``LAYER: what is not compared``, with one line for all layers of which the same is said."""
    layers: dict[str, list[str]] = {}
    for note in notes:
        layer, _, text = note.partition(": ")
        layers.setdefault(text, []).append(layer)
    return [
        f"{', '.join(names[:MAX_NAMED_LAYERS])}"
        f"{f' and {len(names) - MAX_NAMED_LAYERS} more layers' if len(names) > MAX_NAMED_LAYERS else ''}: {text}"
        for text, names in layers.items()
    ]


def describe_finding(finding: Finding) -> str:
    """A finding as a line of the table."""
    verdict = "ok" if finding.passes else "DIFFERS"
    value = f"{finding.difference:.1e}, at most {finding.tolerance:.0e}" if finding.tolerance else ""
    return f"{finding.name:<10} {verdict:<8} {value:<23} {finding.where}".rstrip()


def parse_world_sizes(text: str) -> list[int]:
    """World sizes from ``1,2,3``.

    Raises:
        UsageError: fewer than two different positive numbers.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) > 0 for word in words) or len(set(words)) < 2:
        raise UsageError(
            f"world_sizes is {text!r}; it must be at least two different numbers of processes, such as 1,2,3.",
            reach="run",
        )
    return list(dict.fromkeys(int(word) for word in words))


def verify(sizes: Sequence[int], arguments: Sequence[str], directory: Path) -> list[str]:
    """Train under each world size and compare.

    Args:
        arguments: the training flags of every run.
        directory: an empty directory for the records.

    Returns:
        The report, when all agree.

    Raises:
        ReplicasDifferError: they do not; the message holds the report.
    """
    # Like Ctrl-C: an exception, on whose way out the processes are ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    records: dict[int, dict[str, Record]] = {}
    for size in sizes:
        target = directory / f"size-{size}"
        target.mkdir()
        run_group(size, ["_record", "--record_to", str(target), *arguments], target)
        records[size] = {name: load_record(target / f"{name}.npz") for name in ("float64", "float32")}
    lines, passed = describe_findings(sizes, records)
    if not passed:
        named = ", ".join(map(str, sizes))
        raise ReplicasDifferError("\n  ".join([f"the world sizes {named} do not train the same.", *lines]), reach="run")
    return lines
