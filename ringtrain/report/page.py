"""The HTML page, with its style and program; data from files are escaped text."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ringtrain import __version__
from ringtrain.messages.defects import explaining_import
from ringtrain.report.charts import find_marks, plan_charts
from ringtrain.report.figures import MARKS, PART_COLOURS, RUN_COLOURS, DrawnRun, make_figures
from ringtrain.report.ranking import MOST_COMPARED, rank
from ringtrain.report.reading import RunRecord
from ringtrain.report.series import Curve, make_curves
from ringtrain.report.tables import compare_settings, describe_run, format_seconds
from ringtrain.report.timing import PARTS

TEMPLATE = Path(__file__).parent / "template"


def make_page(runs: Sequence[RunRecord]) -> str:
    names, num_runs = name_runs([run.path for run in runs]), len(runs)
    ranking = None
    if num_runs > MOST_COMPARED:
        ranking, runs = rank(runs, names)
        names = [row["name"] for row in ranking.rows[: len(runs)]]
    drawn = [DrawnRun(name, make_curves(run.events), *find_marks(run)) for name, run in zip(names, runs, strict=True)]
    curves = [run.curves for run in drawn]
    charts = plan_charts(curves)
    has_time = all(np.isfinite(curve.elapsed).all() for of_run in curves for curve in of_run.values())
    payload = {
        "figures": {
            "steps": make_figures(charts, drawn, along_time=False),
            "elapsed": make_figures(charts, drawn, along_time=True) if has_time else [],
        },
        "images": [{name: {"steps": s.steps, "images": s.images} for name, s in run.images.items()} for run in runs],
    }
    tables = [describe_run(run, shown) for run, shown in zip(runs, drawn, strict=True)]
    style, programs, digests = read_own_files()
    differing, same = compare_settings([run.settings for run in runs])
    return load_template().render(
        runs=tables,
        num_runs=num_runs,
        ranking=ranking,
        charts=charts,
        notes=describe_thinning(curves),
        differing=differing,
        same=same,
        kinds=[kind for kind in PARTS if any(kind in table["parts"] for table in tables)],
        part_names=PARTS,
        has_time=has_time,
        mark_kinds=[MARKS[kind] for kind in MARKS if any(mark.kind == kind for run in drawn for mark in run.marks)],
        data=embed_json(payload),
        style=style,
        programs=programs,
        digests=digests,
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    )


def name_runs(paths: Sequence[Path]) -> list[str]:
    short = [path.resolve().name or str(path) for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def describe_thinning(curves: Sequence[dict[str, Curve]]) -> list[str]:
    every = [curve for of_run in curves for curve in of_run.values()]
    notes = []
    thinned = [curve for curve in every if curve.num_values > len(curve.steps)]
    if thinned:
        most, points = max((curve.num_values, len(curve.steps)) for curve in thinned)
        notes.append(
            f"Curves of up to {most:,} values are thinned to at most {points:,} points: a line shows the mean of the "
            "values at each point, the band behind it their smallest and largest value."
        )
    num_not_finite = sum(curve.num_not_finite for curve in every)
    if num_not_finite:
        notes.append(f"{num_not_finite:,} logged values are not finite: they are left out, and crosses mark where.")
    return notes


def embed_json(value: Any) -> str:
    """JSON that cannot end a script element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def load_template() -> Any:
    with explaining_import("report"):
        import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["seconds"] = format_seconds
    return environment.get_template("page.html.j2")


@functools.cache
def read_own_files() -> tuple[str, list[str], list[str]]:
    """Return style, programs, and the programs' digests, by which the page permits them."""
    colours = {f"run-{place}": colour for place, colour in enumerate(RUN_COLOURS)}
    colours |= {f"part-{kind}": colour for kind, colour in PART_COLOURS.items()}
    style = (TEMPLATE / "page.css").read_text(encoding="utf-8")
    style += "".join(
        f".{name} {{ background: {colour}; fill: {colour}; --of-run: {colour}; }}\n" for name, colour in colours.items()
    )
    sources = (resources.files("plotly") / "package_data/plotly.min.js", TEMPLATE / "page.js")
    programs = [source.read_text(encoding="utf-8") for source in sources]  # newlines as a browser hashes them
    digests = [base64.b64encode(hashlib.sha256(program.encode()).digest()).decode() for program in programs]
    return style, programs, digests
