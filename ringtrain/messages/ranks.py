"""Descriptions of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)

MAX_PLACES = 4


def group_ranks(values: Sequence[Value], ranks: Sequence[int] | None = None) -> dict[Value, list[int]]:
    """Group ranks by value; largest group first, then lowest rank. ``ranks``: default all, in order."""
    groups: dict[Value, list[int]] = {}
    for rank, value in zip(ranks or range(len(values)), values, strict=True):
        groups.setdefault(value, []).append(rank)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[1][0])))


def name_ranks(ranks: Sequence[int], nodes: Sequence[str] | Mapping[int, str] | None = None) -> str:
    """Return for example ``rank 1 on node7`` or ``ranks 0-5, 9``; ``ranks`` are ascending."""
    if nodes is None:
        return f"{_noun(ranks)} {_as_runs(ranks)}"
    places = [
        f"{_noun(part)} {_as_runs(part)} on {node}"
        for node, part in ((node, list(part)) for node, part in itertools.groupby(ranks, key=lambda rank: nodes[rank]))
    ]
    if len(places) > MAX_PLACES:
        places[MAX_PLACES:] = [f"ranks on {len(places) - MAX_PLACES} more hosts"]
    return " and ".join([*([", ".join(places[:-1])] if places[:-1] else []), places[-1]])


def _noun(ranks: Sequence[int]) -> str:
    return "ranks" if len(ranks) > 1 else "rank"


def _as_runs(ranks: Sequence[int]) -> str:
    """Use ranges for three or more: ``0-5, 9, 10``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
