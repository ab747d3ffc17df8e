"""Curves of a run, thinned for charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringtrain.report.event_files import choose_evenly

Numbers = npt.NDArray[np.float64]

MAX_POINTS = 800  # per curve, about a chart's pixels
MAX_CROSSES = 50  # non-finite values shown per curve
NOT_CURVES = {"event", "step", "epoch", "samples_seen", "samples", "time", "seconds", "restart_sec"}
NOT_FINITE = {"nan", "inf", "-inf"}  # JSON lacks these numbers


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A logged number over steps; arrays [n], NaN if not finite.

    A point covers the steps after the previous point: mean, smallest and largest value.
    """

    steps: Numbers  # last step of each point
    elapsed: Numbers  # running time in seconds; NaN without times
    means: Numbers
    lows: Numbers
    highs: Numbers
    num_values: int  # before thinning
    num_not_finite: int
    crosses: Numbers  # steps of some non-finite values
    elapsed_crosses: Numbers


def make_curves(events: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Names are such as ``train/loss`` and ``eval/accuracy``."""
    known_times = elapsed_times(events)
    times = np.full(len(events), np.nan) if known_times is None else known_times
    curves = {}
    for kind in ("train", "eval"):
        places = {event["step"]: place for place, event in enumerate(events) if event["event"] == kind}
        chosen = np.array([places[step] for step in sorted(places)], np.intp)  # the last of each step
        steps = np.array([events[place]["step"] for place in chosen], np.float64)
        names = dict.fromkeys(name for place in chosen for name in events[place] if name not in NOT_CURVES)
        for name in names:
            values = [_number_of(events[place].get(name)) for place in chosen]
            is_there = np.array([value is not None for value in values], bool)
            if is_there.any():
                kept = np.array([value for value in values if value is not None], np.float64)
                curves[f"{kind}/{name}"] = thin(steps[is_there], times[chosen][is_there], kept)
    return curves


def elapsed_times(events: Sequence[Mapping[str, Any]]) -> Numbers | None:
    """Return running time in seconds per event, [n], non-decreasing; None if a time is missing.

    Pauses, from ``end`` to the next start, do not count.
    """
    times = [event.get("time") for event in events]
    if not times or not all(type(time) in (int, float) and math.isfinite(time) for time in times):  # type: ignore[arg-type]
        return None
    values = np.maximum.accumulate(np.array(times, np.float64))
    has_ended = np.array([event["event"] == "end" for event in events], bool)
    elapsed: Numbers = np.cumsum(np.where(has_ended[:-1], 0.0, np.diff(values)))
    return np.concatenate([[0.0], elapsed])


def thin(steps: Numbers, elapsed: Numbers, values: Numbers, *, max_points: int = MAX_POINTS) -> Curve:
    """Keep extremes. ``steps``: [n], increasing; ``values``: [n]."""
    is_finite = np.isfinite(values)
    finite = np.where(is_finite, values, np.nan)
    starts = np.arange(len(values))
    if len(values) > max_points:
        borders = np.linspace(steps[0], steps[-1], max_points + 1)[1:-1]
        stretch = np.searchsorted(borders, steps, side="left")
        starts = np.flatnonzero(np.diff(stretch, prepend=-1))
    ends = np.append(starts[1:], len(values)) - 1
    crosses = np.array(choose_evenly(np.flatnonzero(~is_finite).tolist(), MAX_CROSSES), np.intp)
    counts = np.add.reduceat(is_finite.astype(np.float64), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.add.reduceat(np.where(is_finite, values, 0.0), starts) / counts
    return Curve(
        steps=steps[ends],
        elapsed=elapsed[ends],
        means=means,
        lows=np.fmin.reduceat(finite, starts),
        highs=np.fmax.reduceat(finite, starts),
        num_values=len(values),
        num_not_finite=int(len(values) - is_finite.sum()),
        crosses=steps[crosses],
        elapsed_crosses=elapsed[crosses],
    )


def _number_of(value: Any) -> float | None:
    if type(value) not in (int, float) and not (isinstance(value, str) and value in NOT_FINITE):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
