"""A result file as a picture (SVG): every run a dot, medians as ticks; of an all-reduce, lines by size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.spread import describe_spread
from benchmarks.table import format_bytes, list_labels, read_right_figures
from ringtrain.collectives.timing import bus_bandwidth

WIDTH, LABEL_WIDTH, MARGIN = 860, 190, 24
ROW_HEIGHT, TITLE_HEIGHT, AXIS_HEIGHT = 24, 36, 40
LINES_HEIGHT = 320
COLORS = (
    "#1f5fa8", "#7fb0de", "#d1661c", "#3d8c40", "#8a56ac", "#7a7a7a", "#b03a48", "#c9a227", "#2a9d9d", "#e39ac1",
)  # fmt: skip
TEXT = 'font-family="sans-serif" font-size="13" fill="#222"'


def draw_result(result: Mapping[str, Any]) -> str:
    """The experiments of a result file, one below the other."""
    parts, top = [], 0
    for experiment in result["experiments"]:
        has_sizes = experiment["num_bytes"]
        drawn, height = draw_lines(experiment, result["size"]) if has_sizes else draw_dots(experiment)
        parts.append(f'<g transform="translate(0,{top})">{drawn}</g>')
        top += height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}">'
        f'<rect width="{WIDTH}" height="{top}" fill="white"/>{"".join(parts)}</svg>\n'
    )


def draw_dots(experiment: Mapping[str, Any]) -> tuple[str, int]:
    """A row for each contender: a dot for each round, a tick at the median. Returns the picture and its height."""
    [label] = list_labels(experiment) or ["step"]
    names = experiment["contenders"]
    figures = {name: [1000 * value for value in read_right_figures(experiment, name, label)] for name in names}
    largest = max((value for values in figures.values() for value in values), default=1.0)
    ticks = choose_ticks(largest)
    bottom = TITLE_HEIGHT + ROW_HEIGHT * len(figures)

    def place(value: float) -> float:
        return LABEL_WIDTH + (WIDTH - LABEL_WIDTH - MARGIN) * value / ticks[-1]

    parts = [_text(MARGIN, 22, f"{experiment['name']}: milliseconds of {experiment['unit']}", bold=True)]
    for tick in ticks:
        parts.append(_line(place(tick), TITLE_HEIGHT - 6, place(tick), bottom, "#ddd"))
        parts.append(_text(place(tick), bottom + 16, f"{tick:g}", anchor="middle"))
    for number, (name, values) in enumerate(figures.items()):
        middle = TITLE_HEIGHT + ROW_HEIGHT * (number + 0.5)
        parts.append(_text(LABEL_WIDTH - 12, middle + 4, name, anchor="end"))
        if not values:
            parts.append(_text(LABEL_WIDTH + 8, middle + 4, "failed"))
            continue
        color = COLORS[0] if name.startswith("ringtrain") else COLORS[2]
        parts += [_dot(place(value), middle, color) for value in values]
        median = place(describe_spread(values).median)
        parts.append(_line(median, middle - 9, median, middle + 9, "#222", width=2))
    return "".join(parts), bottom + AXIS_HEIGHT


def draw_lines(experiment: Mapping[str, Any], size: int) -> tuple[str, int]:
    """Bus bandwidth by size, both logarithmic: a line through each contender's medians."""
    num_bytes = {label: experiment["num_bytes"][label] for label in list_labels(experiment)}
    curves = {name: _bandwidths(experiment, name, num_bytes, size) for name in experiment["contenders"]}
    powers = [math.log10(value) for curve in curves.values() for _, value in curve] or [0.0]
    low, high = math.floor(min(powers)), math.floor(max(powers)) + 1
    bottom, right = TITLE_HEIGHT + LINES_HEIGHT, WIDTH - LABEL_WIDTH
    first, last = min(num_bytes.values(), default=1), max(num_bytes.values(), default=2)

    def place(value: float, bandwidth: float) -> tuple[float, float]:
        across = math.log(value / first) / math.log(last / first)
        up = (math.log10(bandwidth) - low) / (high - low)
        return 70 + (right - 70) * across, bottom - LINES_HEIGHT * up

    parts = [_text(MARGIN, 22, f"{experiment['name']}: GB/s on the bus", bold=True)]
    for power in range(low, high + 1):
        _, y = place(first, 10.0**power)
        parts += [_line(70, y, right, y, "#ddd"), _text(62, y + 4, f"{10.0**power:g}", anchor="end")]
    for value in num_bytes.values():
        x, _ = place(value, 10.0**low)
        parts.append(_text(x, bottom + 16, format_bytes(value), anchor="middle"))
    for number, (name, curve) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        points = [place(value, bandwidth) for value, bandwidth in curve]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [_dot(x, y, color) for x, y in points]
        legend = TITLE_HEIGHT + 20 * number
        parts += [_line(right + 20, legend, right + 40, legend, color, width=3), _text(right + 46, legend + 4, name)]
    return "".join(parts), bottom + AXIS_HEIGHT


def choose_ticks(largest: float) -> list[float]:
    """Round numbers from 0 to the first that is not below ``largest``, at most nine of them."""
    power = 10.0 ** math.floor(math.log10(largest))
    step = next(factor * power for factor in (0.1, 0.2, 0.5, 1, 2) if largest <= 8 * factor * power)
    return [round(step * number, 12) for number in range(math.ceil(largest / step) + 1)]


def _bandwidths(
    experiment: Mapping[str, Any], name: str, num_bytes: Mapping[str, int], size: int
) -> Sequence[tuple[int, float]]:
    """(bytes, GB/s at the median) of a contender."""
    return [
        (count, bus_bandwidth(count, describe_spread(values).median, size) / 1e9)
        for label, count in num_bytes.items()
        if (values := read_right_figures(experiment, name, label))
    ]


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {TEXT}{weight}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str, *, width: int = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"/>'


def _dot(x: float, y: float, color: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}" fill-opacity="0.6"/>'
