"""Measurements of a run, for a forecast."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from ringtrain.errors import DataError, UsageError
from ringtrain.predict.forecast import Work
from ringtrain.report.reading import RunRecord, read_run
from ringtrain.run.checkpoint import MANIFEST_FILE, read_manifest
from ringtrain.run.store import list_steps, step_name

MIN_INTERVALS = 2  # of the log, after the first, which holds the compilation
UNIFORM_VARIABLES = 50  # for a number of parameters alone


@dataclass(frozen=True, kw_only=True)
class Measured:
    work: Work
    samples: int  # of the whole training
    notes: list[str]


def measure(path: Path) -> Measured:
    """Raise UsageError for a run without enough measurements."""
    run = read_run(path)
    start = run.of_kind("start")[-1] if run.of_kind("start") else {}
    intervals = [event for event in run.of_kind("train") if event["step"] > start.get("first_step", 0)][1:]
    size, batch_size = start.get("size"), start.get("global_batch_size")
    if len(intervals) < MIN_INTERVALS or not size or not batch_size:
        raise UsageError(
            f"{str(path)!r} holds {len(intervals)} measured intervals of steps; a forecast needs {MIN_INTERVALS} after "
            "the first, which compiles. Train longer, or with a smaller --log_every."
        )
    median = {
        name: statistics.median(event[name] for event in intervals)
        for name in ("sec_per_step", "input_sec", "communication_sec")
        if all(name in event for event in intervals)
    }
    exposed = median.get("communication_sec")
    notes = ["all weights of the run are taken as trained"]
    notes += [f"measured on {size} rank{'s' if size > 1 else ''}, {len(intervals)} intervals of the log"]
    if size == 1:
        notes.append("one rank: the cluster's latencies and rates are assumed, not measured")
    if (waits := median.get("input_sec", 0.0)) > 0.05 * median["sec_per_step"]:
        notes.append(f"{waits / median['sec_per_step']:.0%} of a step wait for input, which is assumed to scale")
    work = Work(
        step_sec=median["sec_per_step"],
        compute_sec=None if exposed is None else median["sec_per_step"] - exposed,
        shapes=shapes_of(run, start.get("parameters", 0)),
        value_bytes=2 if run.settings.get("compression") == "fp16" else 4,
        batch_size=batch_size / size,
        measured_on=size,
        accumulate=run.settings.get("accumulate", 1),
    )
    total = start.get("total_steps") or 0
    return Measured(work=work, samples=total * batch_size, notes=notes)


def shapes_of(run: RunRecord, parameters: int) -> list[list[int]]:
    """Return shapes of the weights in the newest checkpoint; equal parts of all parameters without one."""
    directory = run.path / "checkpoints"
    try:
        newest = read_manifest(directory / step_name(list_steps(directory)[-1]) / MANIFEST_FILE)
    except (DataError, OSError, IndexError):
        return uniform(parameters)
    return [item["shape"] for item in newest["variables"] if item["name"].startswith("weights/")]


def uniform(parameters: int) -> list[list[int]]:
    return [[max(parameters // UNIFORM_VARIABLES, 1)]] * UNIFORM_VARIABLES
