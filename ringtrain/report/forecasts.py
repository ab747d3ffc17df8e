"""A forecast (``ringtrain predict --out``) beside what a run has measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ringtrain.errors import UsageError
from ringtrain.files.bounded import read_bounded
from ringtrain.report.reading import RunRecord
from ringtrain.report.tables import format_value
from ringtrain.report.timing import STEP_PARTS, TIMED, find_medians, steady_intervals

MAX_BYTES = 2**20
NEEDED = ("devices", "examples_per_sec", "step_sec", "exposed_sec")
SCENARIO_NAMES = ("expected", "low", "high")
ForecastRows = Mapping[int, Mapping[str, Mapping[str, float]]]  # devices, scenario, name


class Comparison(NamedTuple):
    rows: list[tuple[str, str, str, str]]  # name, measured, forecast, difference
    note: str


def read_forecast(path: Path) -> ForecastRows:
    """Raise UsageError if it is none."""
    try:
        rows = json.loads(read_bounded(path, MAX_BYTES))["rows"]
        numbers = [{name: {key: float(row[name][key]) for key in NEEDED} for name in SCENARIO_NAMES} for row in rows]
        return {int(row["expected"]["devices"]): row for row in numbers}
    except OSError as error:
        raise UsageError(f"forecast is {str(path)!r}, which cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"forecast is {str(path)!r}, which holds no forecast. Make one: ringtrain predict RUN --out DIR"
        ) from None


def compare(run: RunRecord, forecast: ForecastRows) -> Comparison:
    """Compare the medians of the last start, and show where the difference went."""
    starts = run.of_kind("start")
    size, intervals = (starts[-1].get("size") if starts else None), steady_intervals(run.events)
    if not intervals:
        return Comparison([], "No step was measured.")
    if not isinstance(size, int):
        return Comparison([], "The run does not record its number of ranks.")
    if size not in forecast:
        return Comparison([], f"The forecast is for {', '.join(map(str, sorted(forecast)))} ranks, not for {size}.")
    expected, low, high = (forecast[size][name] for name in SCENARIO_NAMES)
    median = find_medians(intervals, *TIMED, *STEP_PARTS)
    step, exposed = median["sec_per_step"], median.get("communication_sec")
    rows = [
        make_row("examples per second", median["examples_per_sec"], expected["examples_per_sec"]),
        make_row("a step (ms)", 1000 * step, 1000 * expected["step_sec"]),
    ]
    if exposed is not None:
        rows += [
            make_row(title, 1000 * measured, 1000 * seconds)
            for title, measured, seconds in (
                ("its compute, input and other time", step - exposed, expected["step_sec"] - expected["exposed_sec"]),
                ("its communication, and waits for other ranks", exposed, expected["exposed_sec"]),
            )
        ]
    low_rate, high_rate = (format_value(each["examples_per_sec"]) for each in (low, high))
    note = f"Medians of the last start. The forecast's interval is {low_rate} to {high_rate} examples per second."
    if "input_sec" in median:
        note += f" Input took {format_value(1000 * median['input_sec'])} ms of a step."
    return Comparison(rows, note)


def make_row(title: str, measured: float, expected: float) -> tuple[str, str, str, str]:
    sign = "+" if measured >= expected else "-"
    return title, format_value(measured), format_value(expected), sign + format_value(abs(measured - expected))
