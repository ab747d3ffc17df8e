"""Measurements of a run, for a forecast."""

from __future__ import annotations

import statistics
from pathlib import Path

from ringtrain.errors import UsageError
from ringtrain.predict.forecast import Work
from ringtrain.report.reading import read_run
from ringtrain.report.timing import find_medians, read_seconds, steady_intervals

MIN_INTERVALS = 2  # of the log, after the first, which holds the compilation
UNIFORM_VARIABLES = 50  # for a number of parameters alone


def measure(path: Path) -> tuple[Work, int, list[str]]:
    """Return work, samples of the whole training, and notes. Raise UsageError without enough measurements."""
    run = read_run(path)
    start = run.of_kind("start")[-1] if run.of_kind("start") else {}
    intervals = steady_intervals(run.events)
    if len(intervals) < MIN_INTERVALS or not (start.get("size") and start.get("parameters")):
        raise UsageError(
            f"{str(path)!r} holds {len(intervals)} measured intervals of steps; a forecast needs {MIN_INTERVALS} after "
            "the first, which compiles. Train longer, or with a smaller --log_every."
        )
    median = find_medians(intervals, "sec_per_step", "input_sec", "communication_sec", "examples_per_sec")
    size, exposed = start["size"], median.get("communication_sec")
    batch_size = start.get("global_batch_size") or median["examples_per_sec"] * median["sec_per_step"]  # of a fit
    notes = [f"measured on {size} rank{'s' if size > 1 else ''}, {len(intervals)} intervals of the log"]
    if size == 1:
        notes.append("one rank: the cluster's latencies and rates are assumed, not measured")
    if (waits := median.get("input_sec", 0.0)) > 0.05 * median["sec_per_step"]:
        notes.append(f"{waits / median['sec_per_step']:.0%} of a step wait for input, which is assumed to scale")
    saves = [seconds for event in run.of_kind("checkpoint") if (seconds := read_seconds(event.get("seconds")))]
    work = Work(
        step_sec=median["sec_per_step"],
        compute_sec=None if exposed is None else median["sec_per_step"] - exposed,
        shapes=start.get("trained_shapes") or uniform(start["parameters"]),  # an older run has none
        value_bytes=4 if run.settings.get("compression", "none") == "none" else 2,
        batch_size=batch_size / size,
        measured_on=size,
        accumulate=run.settings.get("accumulate", 1),
        save_sec=statistics.median(saves) if saves else 0.0,
        save_every=run.settings.get("checkpoint_every") or 0,
    )
    return work, int((start.get("total_steps") or 0) * batch_size), notes


def uniform(parameters: int) -> list[list[int]]:
    return [[max(parameters // UNIFORM_VARIABLES, 1)]] * UNIFORM_VARIABLES
