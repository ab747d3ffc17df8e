"""Ranks of a run's last start: devices, cores, memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from ringtrain.messages.ranks import name_ranks
from ringtrain.report.reading import RunRecord
from ringtrain.report.tables import format_seconds, format_value
from ringtrain.report.timing import STEP_PARTS, attempts

MAX_ROWS = 128
TITLES = {
    "node": "node", "device": "device", "cores": "cores", "pid": "process ID", **STEP_PARTS,
    "peak_memory_mib": "peak memory", "peak_gpu_memory_mib": "peak GPU memory",
}  # fmt: skip


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
    names = [name for name in TITLES if any(name in rank for rank in ranks)]
    rows = [[_cell(name, rank.get(name)) for name in names] for rank in ranks[:MAX_ROWS]]
    return RanksTable([TITLES[name] for name in names], rows, max(0, size - MAX_ROWS))


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
