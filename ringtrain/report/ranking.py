"""Many runs: sorted by their best evaluation, and their settings as parallel coordinates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringtrain.report.charts import DECADES_FOR_LOG
from ringtrain.report.figures import RUN_COLOURS
from ringtrain.report.reading import RunRecord
from ringtrain.report.tables import MISSING, compare_settings, describe_status, format_value
from ringtrain.run.directory import find_best_evaluation

MOST_COMPARED = len(RUN_COLOURS)  # in the rest of the page; more runs are ranked
MAX_AXES = 8
MAX_LABELS = 12  # of an axis without numbers
NOT_SETTINGS = ("out",)  # which differ in any case
WIDTH, HEIGHT, TOP, SIDE = 1000, 300, 34, 80  # of the picture and within it


class Axis(NamedTuple):
    x: float
    title: str
    labels: list[tuple[float, str]]  # y, text


@dataclass(frozen=True)
class Ranking:
    metric: str
    settings: list[str]  # that differ
    rows: list[dict[str, Any]]  # the best first
    num_compared: int
    axes: list[Axis]
    lines: list[str]  # points of an SVG polyline, in the order of ``rows``


def rank(runs: Sequence[RunRecord], names: Sequence[str]) -> tuple[Ranking, list[RunRecord]]:
    """Return the ranking, and the best runs, which the rest of the page compares."""
    metric, is_max = str(runs[0].settings.get("best_metric", "loss")), runs[0].settings.get("best_direction") == "max"
    best = [find_best_evaluation(run.of_kind("eval"), run.settings, metric) for run in runs]
    scores = [None if evaluation is None else float(evaluation[metric]) for evaluation in best]
    order = sorted(range(len(runs)), key=lambda place: order_of(scores[place], is_max))
    named = dict(compare_settings([run.settings for run in runs])[0])
    differing = {name: [values[place] for place in order] for name, values in named.items() if name not in NOT_SETTINGS}
    rows = [
        {
            "name": names[place],
            "status": describe_status(runs[place]),
            "score": format_value(scores[place]),
            "settings": [values[number] for values in differing.values()],
        }
        for number, place in enumerate(order)
    ]
    columns = dict(list(differing.items())[: MAX_AXES - 1])
    columns[metric] = [MISSING if scores[place] is None else repr(scores[place]) for place in order]
    axes, heights = zip(
        *(draw(place, len(columns), *column) for place, column in enumerate(columns.items())), strict=True
    )
    lines = [
        " ".join(f"{axis.x:.1f},{of_axis[number]:.1f}" for axis, of_axis in zip(axes, heights, strict=True))
        for number in range(len(rows))
    ]
    compared = [runs[place] for place in order[:MOST_COMPARED]]
    return Ranking(metric, list(differing), rows, len(compared), list(axes), lines), compared


def order_of(score: float | None, is_max: bool) -> tuple[bool, float]:
    is_known = score is not None and math.isfinite(score)
    return (False, -score if is_max else score) if is_known and score is not None else (True, 0.0)


def draw(place: int, num_axes: int, title: str, texts: Sequence[str]) -> tuple[Axis, list[float]]:
    """Return an axis, and the y of each run on it. Numbers keep their distances; other values are spread evenly."""
    x = SIDE + place * (WIDTH - 2 * SIDE) / max(1, num_axes - 1)
    numbers = [read_number(text) for text in texts]
    known = sorted({number for number in numbers if number is not None})
    if len(known) > 1 and all(
        number is not None or text == MISSING for number, text in zip(numbers, texts, strict=True)
    ):
        is_log = known[0] > 0 and math.log10(known[-1] / known[0]) >= DECADES_FOR_LOG
        scale = math.log10 if is_log else float
        low, high = scale(known[0]), scale(known[-1])
        place_of = {number: (scale(number) - low) / (high - low) for number in known}
        heights = [height(place_of[number]) if number is not None else HEIGHT for number in numbers]
        is_crowded = any(place_of[b] - place_of[a] < 1 / MAX_LABELS for a, b in itertools.pairwise(known))
        shown = [known[0], known[-1]] if is_crowded or len(known) > MAX_LABELS else known
        return Axis(x, title, [(height(place_of[number]), format_value(number)) for number in shown]), heights
    values = sorted(set(texts))
    places = {value: height(number / max(1, len(values) - 1)) for number, value in enumerate(values)}
    labels = [(places[value], value) for value in values[:: math.ceil(len(values) / MAX_LABELS)]]
    return Axis(x, title, labels), [places[text] for text in texts]


def height(share: float) -> float:
    """Return y of a share of the axis, from below."""
    return HEIGHT - TOP - share * (HEIGHT - 2 * TOP)


def read_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
