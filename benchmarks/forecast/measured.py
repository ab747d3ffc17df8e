"""Measurements of a run, for a forecast. Each field of the run is checked before it is used."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.forecast.cluster import Cluster
from benchmarks.forecast.fields import (
    MAX_LISTED_RANKS,
    MAX_SAMPLES,
    MAX_SECONDS,
    MAX_STEP,
    Choice,
    Field,
    Number,
    Ranks,
    Shapes,
    Source,
    Table,
    Text,
    read_fields,
    show,
)
from benchmarks.forecast.model import Work
from benchmarks.writing import show_path
from ringtrain.errors import DataError, UsageError
from ringtrain.files.bounded import parse_json
from ringtrain.run.directory import CONFIG_FILE, FIT_OF, METRICS_FILE, read_config, read_lines

MIN_INTERVALS = 2  # of the log, after the first, which holds the compilation
REMEDY = "Restore the file, or forecast another run."
SAMPLES = Number(least=1, most=MAX_SAMPLES, is_whole=True)
STEP = Number(least=0, most=MAX_STEP, is_whole=True)
SECONDS = Number(least=0, most=MAX_SECONDS)
STEP_SECONDS = Number(least=1e-9, most=MAX_SECONDS)
SETTINGS: Table = {
    "compression": Field(Choice(("none", "fp16", "bf16"))),
    "accumulate": Field(Number(least=1, most=1_000_000, is_whole=True)),
    "checkpoint_every": Field(STEP),
}
SETTINGS_OF_FIT: Table = {"checkpoint_every": SETTINGS["checkpoint_every"]}
EVENTS: Mapping[str, Table] = {
    "start": {
        "size": Field(Number(least=1, most=1_000_000, is_whole=True)),
        "first_step": Field(STEP),
        "trained_shapes": Field(Shapes()),
        "ranks": Field(Ranks()),
        # A fit records neither, and a stream has no known length.
        "global_batch_size": Field(SAMPLES, is_required=False),
        "total_steps": Field(STEP, is_required=False),
    },
    "train": {
        "step": Field(STEP),
        "sec_per_step": Field(STEP_SECONDS),
        "examples_per_sec": Field(Number(least=0, most=10**15)),
        # Of runs of workloads only.
        "input_sec": Field(SECONDS, is_required=False),
        "communication_sec": Field(SECONDS, is_required=False),
    },
    "checkpoint": {
        "seconds": Field(SECONDS),
    },
}


class Measurement(NamedTuple):
    """Work and length of a run, and what is assumed of them."""

    work: Work
    samples: int  # of the whole training; 0: unknown
    assumptions: list[str]


@dataclass
class RunLog:
    """The checked events of a run's last start."""

    start: dict[str, Any]
    intervals: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)


def measure(run: Path, cluster: Cluster) -> Measurement:
    """Return the measurements of a run that was trained on devices like the cluster's.

    Raises UsageError for other devices, or without enough measurements; DataError for a wrong
    value.
    """
    settings = read_settings(run)
    log = read_log(run / METRICS_FILE)
    start = log.start
    require_same_devices(run, start["ranks"], cluster)
    intervals = steady_intervals(log)
    if len(intervals) < MIN_INTERVALS:
        raise UsageError(
            f"{show_path(run)} holds {len(intervals)} measured intervals of steps; a "
            f"forecast needs {MIN_INTERVALS} after the first, which compiles. Train longer, or "
            "with a smaller --log_every."
        )
    median = find_medians(intervals)
    step_sec = median["sec_per_step"]
    global_batch_size = start["global_batch_size"]
    if global_batch_size is None:
        global_batch_size = median["examples_per_sec"] * step_sec
    if global_batch_size <= 0:
        raise DataError(
            f"{show_path(run)} does not record how many samples a step has. Leave the run "
            "out, and give --step_sec, --batch_size and --parameters."
        )
    compute_sec = None
    if "communication_sec" in median:
        compute_sec = step_sec - median["communication_sec"]
        if compute_sec <= 0:
            raise DataError(
                f"{show_path(run / METRICS_FILE)}: the median of communication_sec is "
                f"{median['communication_sec']:g}, and that of sec_per_step {step_sec:g}; a part "
                f"of a step must be less than the step. {REMEDY}"
            )
    save_sec = 0.0
    if log.checkpoints:
        save_sec = statistics.median(event["seconds"] for event in log.checkpoints)
    work = Work(
        step_sec=step_sec,
        compute_sec=compute_sec,
        shapes=start["trained_shapes"],
        value_bytes=4 if settings["compression"] == "none" else 2,
        batch_size=global_batch_size / start["size"],
        measured_on=start["size"],
        accumulate=settings["accumulate"],
        save_sec=save_sec,
        save_every=settings["checkpoint_every"],
    )
    samples = int((start["total_steps"] or 0) * global_batch_size)
    return Measurement(work, samples, describe_measurement(log, median, settings, cluster))


def read_settings(run: Path) -> dict[str, Any]:
    """Return the checked settings of a run.

    A fit has no setting for compression and accumulation.
    """
    config = read_config(run)
    if config is None:
        raise UsageError(
            f"{show_path(run)} is no run directory: it holds no {CONFIG_FILE}. Give the "
            "directory of a run, such as runs/digits."
        )
    source = Source(name=show_path(run / CONFIG_FILE), remedy=REMEDY, error=DataError)
    workload = read_fields({"workload": Field(Text())}, config, source)["workload"]
    if workload.startswith(FIT_OF):
        of_fit = read_fields(SETTINGS_OF_FIT, config, source)
        return {"is_fit": True, "compression": "none", "accumulate": 1, **of_fit}
    return {"is_fit": False, **read_fields(SETTINGS, config, source)}


def read_log(file: Path) -> RunLog:
    """Read the events of a run up to its end, and return those of its last start.

    Lines that hold no event are left out, as a killed run leaves one. Raises UsageError if the file
    cannot be read or has no start, DataError for a wrong value.
    """
    shown = show_path(file)
    log = None
    try:
        for number, line in enumerate(read_lines(file), start=1):
            kind, values = parse_line(line)
            if kind not in EVENTS:
                continue
            name = f"{shown}, line {number}, event {kind}"
            source = Source(name=name, remedy=REMEDY, error=DataError)
            event = read_fields(EVENTS[kind], values, source)
            if kind == "start":
                log = RunLog(event)
                require_all_ranks(event, source)
            elif log is None:
                raise source.refuse("it has no start event before it")
            elif kind == "train":
                log.intervals.append(event)
            else:
                log.checkpoints.append(event)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise UsageError(f"{shown} {reason}. Give the directory of a run.") from None
    if log is None:
        raise UsageError(f"{shown} holds no start event. Give the directory of a run that trained.")
    return log


def parse_line(line: bytes) -> tuple[str, dict[str, Any]]:
    """Return kind and values of an event; an empty kind for a line that is none."""
    try:
        values = parse_json(line)
    except ValueError:
        return "", {}
    if not isinstance(values, dict) or not isinstance(values.get("event"), str):
        return "", {}
    return values["event"], values


def require_all_ranks(start: Mapping[str, Any], source: Source) -> None:
    """Raise the source's error unless all ranks are listed, up to a limit."""
    ranks = start["ranks"]
    num_ranks = min(start["size"], MAX_LISTED_RANKS)
    if len(ranks) != num_ranks:
        rule = f"it must be a list of {count(num_ranks, 'rank')}, as size is {start['size']}"
        raise source.refuse(f"ranks is {show(ranks)}; {rule}")


def require_same_devices(run: Path, ranks: Sequence[Mapping[str, str]], cluster: Cluster) -> None:
    """Raise UsageError unless each rank had a device of the cluster's kind."""
    for rank, described in enumerate(ranks):
        device = described["device"].partition(":")[0]
        if device == cluster.device:
            continue
        where = "CPU cores" if device == "CPU" else "a GPU"
        other = "GPUs" if cluster.device == "GPU" else "CPU cores"
        raise UsageError(
            f"{show_path(run)} cannot be forecast on this cluster: its rank {rank} "
            f"trained on {where}, and the cluster has {other}. The time of a step on one says nothing "
            f"about the other. Give a run on {other}, or name a cluster of {where}."
        )


def steady_intervals(log: RunLog) -> list[dict[str, Any]]:
    """Return the intervals after the first, which compiles."""
    first_step = log.start["first_step"]
    later = [event for event in log.intervals if event["step"] > first_step]
    return later[1:]


def find_medians(intervals: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return medians of the fields that all intervals have."""
    medians = {}
    for name in ("sec_per_step", "examples_per_sec", "input_sec", "communication_sec"):
        values = [event[name] for event in intervals]
        if None not in values:
            medians[name] = statistics.median(values)
    return medians


def describe_measurement(
    log: RunLog, median: Mapping[str, float], settings: Mapping[str, Any], cluster: Cluster
) -> list[str]:
    """Return what the forecast takes from the run, and what it assumes of it, a line each."""
    size = log.start["size"]
    nodes = len({rank["node"] for rank in log.start["ranks"]})
    lines = [
        f"run: {count(size, 'rank')} on {count(nodes, 'node')}, "
        f"{len(steady_intervals(log))} intervals of the log, {median['sec_per_step']:g} s a step"
    ]
    if size == 1:
        lines.append("the run has one rank: no communication was measured")
    else:
        nodes_here = -(-size // cluster.devices_per_node)
        place = f"{size} {cluster.device_words} on {count(nodes_here, 'node')} of this cluster"
        lines.append(f"the run's ranks are taken as {place}")
    if settings["is_fit"]:
        lines.append("a fit records neither compression nor accumulation: none is assumed")
    waits = median.get("input_sec", 0.0) / median["sec_per_step"]
    if waits > 0.05:
        lines.append(f"{waits:.0%} of a step waits for input, on more devices as well")
    return lines


def count(number: int, noun: str) -> str:
    """Return for example ``1 rank`` or ``2 ranks``."""
    plural = "" if number == 1 else "s"
    return f"{number} {noun}{plural}"
