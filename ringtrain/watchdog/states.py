"""States of ranks and detection of hangs; pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringtrain.messages.ranks import name_ranks
from ringtrain.runtime.activity import Note, Phase
from ringtrain.watchdog.stacks import MAX_FRAME_LENGTH

# A rank lost without notice; its launcher usually ends the others within two seconds.
GONE_SECONDS = 20.0
MAX_GROUPS = 6
TOLD_SECONDS = ("still", "limit", "max_silence")


@dataclass(frozen=True, kw_only=True)
class RankState:
    note: Note
    still: float  # seconds without progress, at the report
    limit: float  # seconds without progress that its phase permits
    max_silence: float  # seconds without a report that its phase permits
    where: str = ""  # running line of user code, if still for long
    silent: float = 0.0  # seconds since the report
    is_gone: bool = False  # its connection ended without notice

    @property
    def all_still(self) -> float:
        """In seconds."""
        return self.still + self.silent

    @property
    def is_missing(self) -> bool:
        return self.is_gone or self.silent >= self.max_silence

    def later(self, seconds: float) -> RankState:
        return dataclasses.replace(self, silent=self.silent + seconds)

    def to_message(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in (*TOLD_SECONDS, "where")}
        return {"doing": self.note.doing.name, "step": self.note.step, **told}


def read_state(message: Mapping[str, Any]) -> RankState:
    """Raise KeyError, TypeError or ValueError for invalid messages."""
    note = Note(Phase[message["doing"]], int(message["step"]))
    seconds: dict[str, Any] = {name: float(message[name]) for name in TOLD_SECONDS}
    return RankState(note=note, where=str(message["where"])[:MAX_FRAME_LENGTH], **seconds)


def find_hang(states: Mapping[int, RankState], nodes: Sequence[str], *, sees_all: bool) -> str | None:
    """``states``: of watched ranks that have not left. Without ``sees_all`` it judges only if ranks are missing."""
    missing = [rank for rank, state in states.items() if state.is_missing]
    if not states or not (sees_all or missing):
        return None
    limit = find_limit(states)
    if not all(state.all_still >= limit or state.is_missing for state in states.values()):
        return None
    seconds = min(max(state.all_still, limit) for state in states.values())
    return f"nothing has moved for {seconds:.0f} s: {describe(states, nodes)}."


def find_long_wait(states: Mapping[int, RankState], nodes: Sequence[str], hang_timeout: float) -> str | None:
    """Warn that no rank progresses, if a long phase permits it."""
    seconds = min((state.all_still for state in states.values()), default=0.0)
    if not states or seconds < hang_timeout:
        return None
    limit = find_limit(states)
    return (
        f"no progress for {seconds:.0f} s: {describe(states, nodes)}. A start or a save may take long: the run is "
        f"ended as a hang if nothing moves for another {max(limit - seconds, 0):.0f} s."
    )


def find_limit(states: Mapping[int, RankState]) -> float:
    """Seconds without progress until a hang.

    A long phase counts only if its rank reports it, and does not wait in it for a busy rank.
    """
    missing = [state for state in states.values() if state.is_missing]
    present = [state for state in states.values() if not state.is_missing]
    if missing:
        limits = [state.limit if state.note.place is None else state.max_silence for state in present]
    else:
        busy = find_busy(states)
        limits = [state.limit for state in present if not busy or state.note.doing is not Phase.MEET]
    limit = max(limits, default=0.0)
    return min(limit, GONE_SECONDS) if any(state.is_gone for state in missing) else limit


def describe(states: Mapping[int, RankState], nodes: Sequence[str]) -> str:
    awaited = find_awaited(states)
    others = [rank for rank in states if rank not in awaited]
    parts = [
        describe_group(ranks, states[ranks[0]], nodes) for ranks in group_alike(awaited or others, states, by_time=True)
    ]
    if awaited:
        it = "it" if len(awaited) == 1 else "them"
        for ranks in group_alike(others, states, by_time=False):
            place = states[ranks[0]].note.place
            wait = "waits" if len(ranks) == 1 else "wait"
            parts.append(f"{name_ranks(ranks)} {wait} for {it}{f' {place}' if place else ''}")
    if len(parts) > MAX_GROUPS:
        parts[MAX_GROUPS:] = [f"and {len(parts) - MAX_GROUPS} groups of ranks more"]
    return "; ".join(parts)


def find_awaited(states: Mapping[int, RankState]) -> list[int]:
    """Return missing ranks, else busy ones, else those behind."""
    missing = [rank for rank, state in states.items() if state.is_missing]
    steps = {state.note.step for state in states.values()}
    behind = [rank for rank, state in states.items() if len(steps) > 1 and state.note.step == min(steps)]
    return missing or find_busy(states) or behind


def find_busy(states: Mapping[int, RankState]) -> list[int]:
    """Ranks in a phase without communication."""
    return [rank for rank, state in states.items() if state.note.place is None]


def describe_group(ranks: Sequence[int], state: RankState, nodes: Sequence[str]) -> str:
    who = name_ranks(ranks, nodes)
    words, have = (state.note.words_of_one, "has") if len(ranks) == 1 else (state.note.words, "have")
    if state.is_missing:
        how = "gone" if state.is_gone else "silent"
        return f"{who} {have} been {how} for {state.silent:.0f} s (before: {words})"
    return f"{who} {words} ({state.all_still:.0f} s){f', in {state.where}' if state.where else ''}"


def group_alike(ranks: Sequence[int], states: Mapping[int, RankState], *, by_time: bool) -> list[list[int]]:
    """Group equal phases, longest first if ``by_time``; the first state represents the group."""
    groups: dict[Any, list[int]] = {}
    for rank in ranks:
        state = states[rank]
        groups.setdefault((state.note.doing, state.note.step, state.is_gone, state.is_missing), []).append(rank)
    found = list(groups.values())
    return sorted(found, key=lambda group: -states[group[0]].all_still) if by_time else found
