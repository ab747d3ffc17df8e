"""Figures for plotly.js: dicts of traces and layout."""

from __future__ import annotations

import html
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringtrain.report.charts import Chart, Mark
from ringtrain.report.series import Curve, Numbers

# Contrast of at least 3 on white and on dark grey.
RUN_COLOURS = ("#1f83c9", "#d4611a", "#12906a", "#c75f9f", "#a07c10", "#7a70e0")
PART_COLOURS = {
    "sec_per_step": "#6d7a8b",
    "training": "#6361c9",
    "compute_sec": "#6361c9",
    "input_sec": "#b08a18",
    "communication_sec": "#2f8fa8",
    "other_sec": "#9190c8",
    "evaluation": "#2f8f83",
    "lost": "#cf5f78",
    "killed": "#b9733f",
    "rest": "#8a95a3",
}
DASHES = ("solid", "dash", "dot", "dashdot")
BAND_OPACITY = "38"  # of ff
MARKS = {  # glyph, meaning, colour for a single run, dash
    "restart": ("\N{BLACK DOWN-POINTING TRIANGLE}", "started again", "#6d7a8b", "dash"),
    "warning": ("\N{BLACK UP-POINTING TRIANGLE}", "warning", "#b37400", "dot"),
    "end": ("\N{BLACK SQUARE}", "end", "#6d7a8b", "solid"),
    "failure": ("\N{BLACK DIAMOND}", "end by an error", "#d9453b", "solid"),
}
GLYPH_WIDTH, LEGEND_ROW, TITLE_STANDOFF = 12, 20, 6  # pixels
MAX_LEGEND_ROWS = 6  # then scrolling
MAX_DOTS = 60  # per curve, for legibility
MAX_NAME = 40  # characters in a legend
LEGEND = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"}
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True)
class DrawnRun:
    name: str
    curves: dict[str, Curve]
    marks: list[Mark]
    num_left_out: int  # older marks


def make_figures(charts: Sequence[Chart], runs: Sequence[DrawnRun], *, along_time: bool) -> list[dict[str, Any]]:
    """One figure per chart, by step or running time.

    Traces and shapes have an extra field ``run``, their index.
    """
    shown = [run.curves[key] for run in runs for chart in charts for key in chart.curves if key in run.curves]
    if not shown:
        return []
    title: dict[str, Any] = {"text": "step", "standoff": TITLE_STANDOFF}
    axis: dict[str, Any] = {"title": title, "unifiedhovertitle": {"text": "step %{x}"}, "hoverformat": ",d"}
    if along_time:
        longest = max(float(curve.elapsed[-1]) for curve in shown)
        size, unit = next((unit for unit in UNITS if longest >= 2 * unit[0]), UNITS[-1])
        runs = [_along_time(run, size) for run in runs]
        title["text"] = f"running time ({unit})"
        axis |= {"unifiedhovertitle": {"text": f"%{{x}} {unit}"}, "hoverformat": ",.4~r"}
    every = [curve.steps for run in runs for curve in run.curves.values()]
    marked = [mark.step for run in runs for mark in run.marks]
    low, high = min([0.0, *map(np.nanmin, every)]), max([*map(np.nanmax, every), *marked])  # NaN: pauses
    axis["range"] = [float(low), float(high if high > low else low + 1)]
    marks = list(_marks(runs))
    figures = []
    for chart in charts:
        traces = [trace for place in range(len(runs)) for trace in _traces(chart, runs, place)]
        has_legend = len(runs) == 1 or len(chart.curves) > 1  # else the page's list of runs suffices
        num_names = sum(trace["showlegend"] for trace in traces) if has_legend else 0
        figures.append({"data": traces, "layout": _layout(chart, axis, marks, num_names=num_names)})
    return figures


def _layout(
    chart: Chart, axis: dict[str, Any], marks: list[tuple[dict[str, Any], dict[str, Any]]], *, num_names: int
) -> dict[str, Any]:
    values = {
        "type": "log" if chart.scale == "log" else "linear",
        "rangemode": "tozero" if chart.scale == "zero" else "normal",
        "fixedrange": True,  # zoom along the shared axis only
        "hoverformat": ",.4~r" if chart.unit == "examples/s" else ".4~g",
        "exponentformat": "SI" if chart.unit == "examples/s" else "none" if chart.scale == "log" else "power",
    }
    rows = 1 if num_names <= 2 else min(num_names, MAX_LEGEND_ROWS)  # narrow screens and paper
    legend_height = num_names and LEGEND_ROW * rows + 12
    return {
        "height": 270 + legend_height,
        "margin": {"l": 55, "r": 12, "t": 44, "b": 45 + legend_height},
        "hovermode": "x unified",
        "hoverdistance": -1,
        "hoverlabel": {"namelength": -1},
        "showlegend": num_names > 0,
        "legend": dict(LEGEND, maxheight=legend_height or 1),
        "xaxis": axis,
        "yaxis": values,
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "shapes": [line for line, _ in marks],
        "annotations": [glyph for _, glyph in marks],
    }


def _along_time(run: DrawnRun, size: int) -> DrawnRun:
    marks = [replace(mark, step=mark.elapsed / size) for mark in run.marks if mark.elapsed is not None]
    starts = [mark.step for mark in marks if mark.kind == "restart"]
    curves = {}
    for key, curve in run.curves.items():
        at = curve.elapsed / size
        pauses = np.searchsorted(at, starts)  # gaps in the curve
        steps, means, lows, highs = (
            np.insert(values, pauses, np.nan) for values in (at, curve.means, curve.lows, curve.highs)
        )
        crosses = curve.elapsed_crosses / size
        curves[key] = replace(curve, steps=steps, means=means, lows=lows, highs=highs, crosses=crosses)
    return replace(run, curves=curves, marks=marks)


def _traces(chart: Chart, runs: Sequence[DrawnRun], place: int) -> Iterator[dict[str, Any]]:
    run = runs[place]
    for number, key in enumerate(chart.curves):
        if key not in run.curves:
            continue
        curve, what, is_evaluation = run.curves[key], chart.curves[key], key.startswith("eval/")
        if len(runs) == 1:
            name, dash = what, 0
            colour = PART_COLOURS.get(key.partition("/")[2], RUN_COLOURS[number % len(RUN_COLOURS)])
        else:
            short = run.name if len(run.name) <= MAX_NAME else run.name[:MAX_NAME] + "\N{HORIZONTAL ELLIPSIS}"
            name = short if len(chart.curves) == 1 else f"{short}, {what}"
            dash = place // len(RUN_COLOURS) + (0 if is_evaluation else number)
            colour = RUN_COLOURS[place % len(RUN_COLOURS)]
        common = {"run": place, "legendgroup": key, "showlegend": False, "hoverinfo": "skip", "mode": "lines"}
        if (curve.highs > curve.lows).any():
            band = {"fill": "toself", "fillcolor": colour + BAND_OPACITY, "line": {"width": 0}}
            yield common | band | _outline(curve.steps, curve.lows, curve.highs)
        yield common | {
            "x": _plain(curve.steps),
            "y": _plain(curve.means),
            "name": _as_text(name),
            "mode": "lines+markers" if len(curve.steps) <= MAX_DOTS else "lines",
            "line": {"color": colour, "width": 2.2 if is_evaluation else 1.4, "dash": DASHES[dash % len(DASHES)]},
            "marker": {"size": 7 if is_evaluation else 3},
            "showlegend": True,
            "hoverinfo": "all",
        }
        if curve.num_not_finite:
            marker = {"symbol": "x-thin", "size": 8, "line": {"width": 1.5, "color": colour}}
            x = _plain(curve.crosses)
            yield common | {"mode": "markers", "x": x, "y": [0.97] * len(x), "yaxis": "y2", "marker": marker}


def _outline(x: Numbers, lows: Numbers, highs: Numbers) -> dict[str, Any]:
    along: list[float] = []
    up: list[float] = []
    for piece in np.ma.clump_unmasked(np.ma.masked_invalid(lows)):
        along += [*x[piece], *x[piece][::-1], np.nan]
        up += [*highs[piece], *lows[piece][::-1], np.nan]
    return {"x": _plain(along), "y": _plain(up)}


def _marks(runs: Sequence[DrawnRun]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    taken: Counter[float] = Counter()
    for place, run in enumerate(runs):
        for mark in run.marks:
            glyph, _, colour, dash = MARKS[mark.kind]
            colour = colour if len(runs) == 1 else RUN_COLOURS[place % len(RUN_COLOURS)]
            text = f"{'end' if mark.kind == 'failure' else mark.kind}: {mark.text}"
            common = {"run": place, "xref": "x", "yref": "paper"}
            yield (
                common | {"type": "line", "x0": mark.step, "x1": mark.step, "y0": 0, "y1": 1,
                          "line": {"color": colour, "width": 1.2, "dash": dash}},
                common | {"x": mark.step, "y": 1, "yanchor": "bottom", "xshift": GLYPH_WIDTH * taken[mark.step],
                          "showarrow": False, "text": glyph, "font": {"color": colour}, "spoken": text,
                          "hovertext": "<br>".join(map(_as_text, textwrap.wrap(text, 60)))},
            )  # fmt: skip
            taken[mark.step] += 1


def _as_text(text: str) -> str:
    return html.escape(text, quote=False)


def _plain(values: Any) -> list[float | None]:
    """Six significant digits, all digits of integers; None if not finite."""
    return [float(value if value.is_integer() else f"{value:.6g}") if np.isfinite(value) else None for value in values]
