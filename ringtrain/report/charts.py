"""Charts of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ringtrain.errors import STATUS_WORDS
from ringtrain.report.reading import RunRecord
from ringtrain.report.series import Curve, Numbers, elapsed_times
from ringtrain.report.timing import STEP_PARTS

DECADES_FOR_LOG = 2.0  # larger spans use a logarithmic axis
MAX_MARKS = 200  # per run, to fit
KIND_NAMES = {"train": "training", "eval": "evaluation"}


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str = ""
    scale: str = "linear"  # "log", or "zero" (from 0)
    curves: dict[str, str] = field(default_factory=dict)  # names with legend texts


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event at a step: ``restart``, ``warning``, ``end`` or ``failure``."""

    kind: str
    step: float
    elapsed: float | None
    text: str


# For numbers logged by the loop.
LOSSES = {"loss": Chart("Loss"), "data_loss": Chart("Loss on the data, without regularisation")}
OTHERS = {
    "lr": Chart("Learning rate", scale="zero"),
    "gradient_norm": Chart("Gradient norm"),
    "examples_per_sec": Chart("Throughput, all ranks", unit="examples/s", scale="zero"),
}
MAY_BE_LOG = {"loss", "data_loss", "gradient_norm"}
TIMES = {"sec_per_step": "whole step", **STEP_PARTS}


def plan_charts(runs: Sequence[dict[str, Curve]]) -> list[Chart]:
    names = dict.fromkeys(name.partition("/")[2] for curves in runs for name in curves)
    if all(_is_same(curves) for curves in runs):
        names.pop("data_loss", None)
    metrics = [name for name in names if name not in LOSSES | OTHERS | TIMES]
    charts = [
        replace(chart, curves=_kinds_of(name, runs), scale=_scale(name, chart.scale, runs))
        for name, chart in (LOSSES | {name: Chart(_in_words(name)) for name in metrics} | OTHERS).items()
        if name in names
    ]
    if set(STEP_PARTS) & set(names):
        times = {f"train/{name}": title for name, title in TIMES.items() if name in names}
        charts.append(Chart("Step time", unit="s", scale="zero", curves=times))
    return charts


def find_marks(run: RunRecord) -> tuple[list[Mark], int]:
    """Return marks, and the number omitted."""
    times = elapsed_times(run.events)
    marks, step = [], 0
    for place, event in enumerate(run.events):
        kind = event["event"]
        step = event.get("step", event.get("first_step", step) if kind == "start" else step)
        if type(step) is not int:
            step = 0
        if kind == "start" and place > 0:
            size = event.get("size", "?")
            ranks = f"{size} rank{'' if size == 1 else 's'}"
            mark, text = "restart", f"started again on {ranks} from step {event.get('first_step', '?')}"
        elif kind == "warning":
            mark, text = "warning", f"{event.get('message', 'a warning without a text')}"
        elif kind == "end":
            mark, text = "end" if event.get("exit_code") in (0, 75) else "failure", describe_end(event)
        else:
            continue
        elapsed = float(times[place]) if times is not None else None
        marks.append(Mark(kind=mark, step=step, elapsed=elapsed, text=text))
    return marks[-MAX_MARKS:], max(0, len(marks) - MAX_MARKS)


def describe_end(event: dict[str, Any]) -> str:
    code = event.get("exit_code")
    status = str(event.get("status", "ended"))
    text = STATUS_WORDS.get(status, status) + (f", exit code {code}" if code else "")
    return text + (f": {event['message']}" if event.get("message") else "")


def _in_words(name: str) -> str:
    words = name.replace("_", " ")
    return words[:1].upper() + words[1:]


def _kinds_of(name: str, runs: Sequence[dict[str, Curve]]) -> dict[str, str]:
    there = [kind for kind in KIND_NAMES if any(f"{kind}/{name}" in curves for curves in runs)]
    return {f"{kind}/{name}": KIND_NAMES[kind] for kind in there}


def _is_same(curves: dict[str, Curve]) -> bool:
    """True without regularisation."""
    return all(
        f"{kind}/data_loss" not in curves
        or (f"{kind}/loss" in curves and _are_equal(curves[f"{kind}/loss"].means, curves[f"{kind}/data_loss"].means))
        for kind in KIND_NAMES
    )


def _are_equal(a: Numbers, b: Numbers) -> bool:
    return len(a) == len(b) and bool(np.allclose(a, b, rtol=1e-5, atol=0, equal_nan=True))


def _scale(name: str, scale: str, runs: Sequence[dict[str, Curve]]) -> str:
    if name not in MAY_BE_LOG:
        return scale
    shown = [curves[key] for curves in runs for key in _kinds_of(name, [curves])]
    lows = np.concatenate([curve.lows[np.isfinite(curve.lows)] for curve in shown])
    highs = np.concatenate([curve.highs[np.isfinite(curve.highs)] for curve in shown])
    if not len(lows) or lows.min() <= 0:
        return scale
    return "log" if np.log10(highs.max()) - np.log10(lows.min()) > DECADES_FOR_LOG else scale
