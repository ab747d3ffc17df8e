"""Tables of a report: facts, settings and ranks of runs."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringtrain.messages.ranks import name_ranks
from ringtrain.report.charts import describe_end
from ringtrain.report.figures import DrawnRun
from ringtrain.report.reading import RunRecord
from ringtrain.report.series import elapsed_times
from ringtrain.report.timing import STEP_PARTS, attempts, read_seconds, split_time
from ringtrain.run.directory import find_best_evaluation

MISSING = "\N{EN DASH}"
MAX_RANKS = 128
RANK_TITLES = {
    "node": "node", "device": "device", "cores": "cores", "pid": "process ID", **STEP_PARTS,
    "peak_memory_mib": "peak memory", "peak_gpu_memory_mib": "peak GPU memory",
}  # fmt: skip


@dataclass(frozen=True)
class Fact:
    name: str
    value: str
    note: str = ""


def describe_run(run: RunRecord, drawn: DrawnRun) -> dict[str, Any]:
    verdict, status = describe_status(run)
    parts = split_time(run.events)
    command = run.facts.get("command")
    plural = "s" if run.num_unreadable != 1 else ""
    unreadable = f"{run.num_unreadable} line{plural} of metrics.jsonl could not be read, and are left out."
    return {
        "name": drawn.name,
        "path": str(run.path),
        "verdict": verdict,
        "status": status,
        "facts": list_facts(run),
        "parts": parts,
        "seconds": sum(parts.values()),
        "marks": drawn.marks,
        "num_left_out": drawn.num_left_out,
        "environment": describe_environment(run),
        "ranks": list_ranks(run),
        "stacks": list_stacks(run),
        "command": shlex.join(map(str, command)) if isinstance(command, list) else "",
        "has_times": all("time" in event for event in run.events),
        "images": run.images,
        "notes": [unreadable] if run.num_unreadable else [],
    }


def describe_status(run: RunRecord) -> tuple[str, str]:
    """Return CSS class and text."""
    last = run.events[-1]
    if last["event"] != "end":
        return "waiting", "no end recorded: it is running, or was killed"
    code = last.get("exit_code")
    return ("good" if code == 0 else "waiting" if code == 75 else "bad"), describe_end(last)


def list_facts(run: RunRecord) -> list[Fact]:
    starts, training, evaluations = run.of_kind("start"), run.of_kind("train"), run.of_kind("eval")
    start = starts[-1] if starts else {}
    reached = [event["step"] for event in training + evaluations + run.of_kind("checkpoint")]
    reached += [event["first_step"] for event in starts if type(event.get("first_step")) is int]
    last = max(reached, default=0)
    total = start.get("total_steps")
    facts = [Fact("Steps", format_value(last), f"of {format_value(total)}" if total else "")]
    facts += _best_evaluation(run)
    if training:
        facts.append(Fact("Last training loss", format_value(training[-1].get("loss"))))
        speed = sorted(e["examples_per_sec"] for e in training if type(e.get("examples_per_sec")) in (int, float))
        if speed:
            facts.append(Fact("Examples per second", format_value(speed[len(speed) // 2]), "median, all ranks"))
    facts.append(Fact("Ranks", format_value(start.get("size"))))
    batch = f"global batch {format_value(start.get('global_batch_size'))}"
    samples, steps = start.get("samples"), start.get("steps_per_epoch")
    if samples is not None:
        facts.append(Fact("Samples", format_value(samples), batch))
    elif steps is not None:
        facts.append(Fact("Steps per epoch", format_value(steps), batch))
    elif training:
        facts.append(Fact("Samples trained on", format_value(training[-1].get("samples_seen")), "with repetitions"))
    facts.append(Fact("Parameters", format_value(start.get("parameters"))))
    elapsed = elapsed_times(run.events)
    if elapsed is not None:
        number = len(attempts(run.events))
        facts.append(
            Fact("Time", format_seconds(float(elapsed[-1])), f"{number} starts, without pauses" if number > 1 else "")
        )
    restart = max((read_seconds(event.get("restart_sec")) for event in training), default=0.0)
    if restart:
        facts.append(Fact("Longest restart", format_seconds(restart), "between the logged steps before and after it"))
    return facts


def _best_evaluation(run: RunRecord) -> list[Fact]:
    metric = str(run.settings.get("best_metric", "loss"))
    best = find_best_evaluation(run.of_kind("eval"), run.settings)
    if best is None:
        return []
    title = "Best evaluation loss" if metric == "loss" else f"Best {metric}"
    facts = [Fact(title, format_value(best[metric]), f"at step {format_value(best['step'])}")]
    others = [name for name in best if name not in _NOT_METRICS | {metric} and type(best[name]) in (int, float)]
    return facts + [
        Fact(name.replace("_", " ").capitalize(), format_value(best[name]), facts[0].note) for name in others
    ]


_NOT_METRICS = {"event", "step", "epoch", "samples", "seconds", "time", "loss", "data_loss"}


def describe_environment(run: RunRecord) -> list[Fact]:
    starts = run.of_kind("start")
    start = starts[-1] if starts else {}
    facts = [Fact(name, format_value(start[name])) for name in ("launcher", "node") if name in start]
    versions = start.get("versions", run.facts.get("versions"))
    if isinstance(versions, dict):
        facts += [Fact(f"{name}", format_value(version)) for name, version in versions.items()]
    if isinstance(run.facts.get("git_revision"), str):
        commit, _, dirty = run.facts["git_revision"].partition("-")
        facts.append(Fact("git revision", commit[:12] + (" with changes" if dirty else "")))
    if type(start.get("time")) in (int, float):
        facts.append(Fact("last start", time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(start["time"]))))
    return facts


class RanksTable(NamedTuple):
    columns: list[str]  # after the rank's number
    rows: list[list[str]]
    num_left_out: int  # of ranks


def list_ranks(run: RunRecord) -> RanksTable:
    starts = [attempt for attempt in attempts(run.events) if attempt[0]["event"] == "start"]
    first, last = (starts[-1][0], starts[-1][-1]) if starts else ({}, {})
    places, usages = _of_ranks(first), _of_ranks(last if last.get("event") == "end" else {})
    size = max(len(places), len(usages))
    ranks: list[dict[str, Any]] = [{} for _ in range(size)]
    for values in (places, usages):
        for rank, of_rank in zip(ranks, values, strict=False):
            rank.update(of_rank)
    names = [name for name in RANK_TITLES if any(name in rank for rank in ranks)]
    rows = [[_cell(name, rank.get(name)) for name in names] for rank in ranks[:MAX_RANKS]]
    return RanksTable([RANK_TITLES[name] for name in names], rows, max(0, size - MAX_RANKS))


def list_stacks(run: RunRecord) -> list[tuple[str, str]]:
    """Return ranks and text of stacks, if the run ended in a hang."""
    last = run.events[-1]
    groups = last.get("stacks") if last["event"] == "end" else None
    found = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    return [
        (name_ranks(ranks), str(group.get("text", ""))) for group in found if (ranks := _numbers(group.get("ranks")))
    ]


def _numbers(value: Any) -> list[int]:
    return [number for number in value if type(number) is int] if isinstance(value, list) else []


def _of_ranks(event: Any) -> list[dict[str, Any]]:
    ranks = event.get("ranks")
    return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []


def _cell(name: str, value: Any) -> str:
    if type(value) in (int, float) and name in STEP_PARTS:
        return format_seconds(value)
    if type(value) in (int, float) and name.endswith("_mib"):
        return f"{format_value(value)} MiB"
    return str(value) if type(value) is int else format_value(value)


def compare_settings(runs: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, list[str]]], list[Fact]]:
    """Return differing settings, and equal ones."""
    names = dict.fromkeys(name for settings in runs for name in settings)
    differing, same = [], []
    for name in names:
        given = [settings.get(name, "not set") for settings in runs]
        values = [value if isinstance(value, str) else json.dumps(value, default=str) for value in given]
        if len(set(values)) > 1:
            differing.append((name, values))
        elif values[0] != "null":
            same.append(Fact(name, values[0]))
    return differing, same


def format_value(value: Any) -> str:
    """Four digits, all digits of integers; a dash if missing."""
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if math.isfinite(value) and abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def format_seconds(seconds: float) -> str:
    """Use the two largest units, such as 2 h 5 min."""
    if not math.isfinite(seconds) or seconds < 0:
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, of, smaller in ((86400, "d", "h"), (3600, "h", "min"), (60, "min", "s")):
        if whole >= unit:
            rest = whole % unit // {"h": 3600, "min": 60, "s": 1}[smaller]
            return f"{whole // unit} {of}" + (f" {rest} {smaller}" if rest else "")
    raise AssertionError(seconds)
