"""Where the time of a run went, by its events' times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Events = Sequence[Mapping[str, Any]]

# A step's time in parts, where the log says them: the field of a ``train`` event, and what it is.
STEP_PARTS = {
    "input_sec": "waiting for data",
    "compute_sec": "computing",
    "communication_sec": "communicating",
    "other_sec": "rest of the steps",
}
PARTS = {
    **STEP_PARTS,
    "training": "training steps",
    "evaluation": "evaluation",
    "lost": "lost and between starts",
    "rest": "start-up, saves, the rest",
}
SAVED_ALL = ("completed", "preempted")


def split_time(events: Events) -> dict[str, float]:
    """The known seconds of each of ``PARTS``, from the run's first ``start`` event to its last event.

    Steps that were trained again after a restart, and the time when nothing ran, are one part: of a process that was
    killed nobody knows when.
    """
    known = _training(events) | {"evaluation": sum(_seconds(event.get("seconds")) for event in _of(events, "eval"))}
    if all("time" in event for event in events):
        known["lost"] = sum(_gaps(events))
        known["rest"] = _seconds(events[-1]["time"]) - _seconds(events[0]["time"]) - sum(known.values())
    return {kind: seconds for kind, seconds in known.items() if seconds > 0}


def attempts(events: Events) -> list[list[Mapping[str, Any]]]:
    """A run's events by the start that they follow."""
    parts: list[list[Mapping[str, Any]]] = []
    for event in events:
        if event["event"] == "start" or not parts:
            parts.append([])
        parts[-1].append(event)
    return parts


def _training(events: Events) -> dict[str, float]:
    """The time of all steps, in the parts that the log knows."""
    total, parts = 0.0, dict.fromkeys(STEP_PARTS, 0.0)
    for attempt in attempts(events):
        before = _seconds(attempt[0].get("first_step"))
        for event in _of(attempt, "train"):
            num_steps, before = event["step"] - before, event["step"]
            total += num_steps * _seconds(event.get("sec_per_step"))
            for name in STEP_PARTS:
                parts[name] += num_steps * _seconds(event.get(name))
    if any(parts.values()):
        parts["other_sec"] = max(parts["other_sec"], total - sum(parts.values()) + parts["other_sec"])
        return parts
    return {"training": total}


def _gaps(events: Events) -> Iterator[float]:
    """From where each start's work was kept to the next start."""
    parts = attempts(events)
    for attempt, following in itertools.pairwise(parts):
        end = attempt[-1]
        if end["event"] != "end" or end.get("status") not in SAVED_ALL:
            end = next((event for event in reversed(attempt) if event["event"] != "end"), end)
        yield max(0.0, _seconds(following[0]["time"]) - _seconds(end["time"]))


def _of(events: Events, kind: str) -> list[Mapping[str, Any]]:
    return [event for event in events if event["event"] == kind]


def _seconds(value: Any) -> float:
    """A number of an event; 0 where it has none."""
    return float(value) if type(value) in (int, float) and abs(value) < 1e15 else 0.0
