"""A forecast (``ringtrain predict --out``) beside what a run has measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ringtrain.errors import UsageError
from ringtrain.files.bounded import read_bounded
from ringtrain.report.reading import RunRecord
from ringtrain.report.tables import format_value
from ringtrain.report.timing import STEP_PARTS, TIMED, steady_intervals

MAX_BYTES = 2**20
SCENARIOS = ("expected", "low", "high")
Forecast = Mapping[int, Mapping[str, Mapping[str, float]]]  # devices, scenario, name


class Comparison(NamedTuple):
    rows: list[tuple[str, str, str, str]]  # name, measured, forecast, difference
    note: str


def read_forecast(path: Path) -> Forecast:
    """Raise UsageError if it is none."""
    try:
        rows = json.loads(read_bounded(path, MAX_BYTES))["rows"]
        numbers = [{name: {key: float(row[name][key]) for key in row[name]} for name in SCENARIOS} for row in rows]
        return {int(row["expected"]["devices"]): row for row in numbers}
    except OSError as error:
        raise UsageError(f"forecast is {str(path)!r}, which cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"forecast is {str(path)!r}, which holds no forecast. Make one: ringtrain predict RUN --out DIR"
        ) from None


def compare(run: RunRecord, forecast: Forecast) -> Comparison:
    """Compare the medians of the last start, and show where the difference went."""
    starts = run.of_kind("start")
    size, intervals = (starts[-1].get("size") if starts else None), steady_intervals(run.events)
    if not intervals:
        return Comparison([], "No step was measured.")
    if not isinstance(size, int) or size not in forecast:
        return Comparison([], f"The forecast is for {', '.join(map(str, sorted(forecast)))} ranks, not for {size}.")
    expected, low, high = (forecast[size][name] for name in SCENARIOS)
    median = {
        name: statistics.median(event[name] for event in intervals)
        for name in (*TIMED, *STEP_PARTS)
        if all(name in event for event in intervals)
    }
    step, exposed = median["sec_per_step"], median.get("communication_sec")
    rows = [
        make_row("examples per second", median["examples_per_sec"], expected["examples_per_sec"]),
        make_row("a step (ms)", 1000 * step, 1000 * expected["step_sec"]),
    ]
    if exposed is not None:
        rows += [
            make_row(title, 1000 * measured, 1000 * foreseen)
            for title, measured, foreseen in (
                ("its compute, input and other time", step - exposed, expected["step_sec"] - expected["exposed_sec"]),
                ("its communication, and waits for other ranks", exposed, expected["exposed_sec"]),
            )
        ]
    low_rate, high_rate = (format_value(each["examples_per_sec"]) for each in (low, high))
    input_ms = format_value(1000 * median.get("input_sec", 0.0))
    return Comparison(
        rows,
        f"Medians of the last start. The forecast's interval is {low_rate} to {high_rate} examples per second. Input "
        f"took {input_ms} ms of a step.",
    )


def make_row(title: str, measured: float, foreseen: float) -> tuple[str, str, str, str]:
    return title, format_value(measured), format_value(foreseen), f"{measured - foreseen:+,.4g}"
