"""A run's time in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringtrain.report.series import Numbers, elapsed_times

Events = Sequence[Mapping[str, Any]]

# Fields of ``train`` events.
STEP_PARTS = {
    "input_sec": "input",
    "compute_sec": "compute",
    "communication_sec": "communication",
    "other_sec": "other time of the steps",
}
PARTS = {
    **STEP_PARTS,
    "training": "training steps",
    "evaluation": "evaluation",
    "lost": "lost after a failure",
    "killed": "from a kill to the next start",
    "rest": "start-up, saves, other",
}
SAVED_ALL = ("completed", "preempted")


def split_time(events: Events) -> dict[str, float]:
    """Return seconds of ``PARTS`` without pauses (``end`` to next start).

    The time of a kill is unknown: from the last event to the next start counts as ``killed``.
    """
    known = _training(events) | {"evaluation": sum(read_seconds(event.get("seconds")) for event in _of(events, "eval"))}
    elapsed = elapsed_times(events)
    if elapsed is not None:
        known |= _interrupted(events, elapsed)
        known["rest"] = float(elapsed[-1]) - sum(known.values())
    return {kind: seconds for kind, seconds in known.items() if seconds > 0}


def attempts(events: Events) -> list[list[Mapping[str, Any]]]:
    """Split by start, including failed ones."""
    parts: list[list[Mapping[str, Any]]] = []
    for event in events:
        if not parts or event["event"] == "start" or parts[-1][-1]["event"] == "end":
            parts.append([])
        parts[-1].append(event)
    return parts


def _training(events: Events) -> dict[str, float]:
    total, parts = 0.0, dict.fromkeys(STEP_PARTS, 0.0)
    for attempt in attempts(events):
        before = read_seconds(attempt[0].get("first_step"))
        for event in _of(attempt, "train"):
            num_steps, before = event["step"] - before, event["step"]
            total += num_steps * read_seconds(event.get("sec_per_step"))
            for name in STEP_PARTS:
                parts[name] += num_steps * read_seconds(event.get(name))
    if any(parts.values()):
        parts["other_sec"] = max(parts["other_sec"], total - sum(parts.values()) + parts["other_sec"])
        return parts
    return {"training": total}


def _interrupted(events: Events, elapsed: Numbers) -> dict[str, float]:
    """Lost in failures (after the last event) and kills (up to the next start)."""
    known = {"lost": 0.0, "killed": 0.0}
    first = 0
    for attempt in attempts(events):
        following = first + len(attempt)
        has_end = attempt[-1]["event"] == "end"
        if has_end and attempt[-1].get("status") not in SAVED_ALL:
            kept = max((place for place, event in enumerate(attempt) if event["event"] != "end"), default=0)
            known["lost"] += float(elapsed[following - 1] - elapsed[first + kept])
        elif not has_end and following < len(events):
            known["killed"] += float(elapsed[following] - elapsed[following - 1])
        first = following
    return known


def _of(events: Events, kind: str) -> list[Mapping[str, Any]]:
    return [event for event in events if event["event"] == kind]


def read_seconds(value: Any) -> float:
    return float(value) if type(value) in (int, float) and abs(value) < 1e15 else 0.0
