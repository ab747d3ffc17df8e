"""A result file as a table, and the page of all results (``benchmarks page``): each figure is from a result file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rounds import find_faults
from benchmarks.spread import describe_spread, paired_ratios
from ringtrain.collectives.timing import bus_bandwidth

Result = Mapping[str, Any]
SIZE_STRIDE = 4  # every fourth: 4 KiB, 1 MiB and 256 MiB
QUESTIONS = {
    "step": "A training step compared with plain Horovod, tf.distribute, unconnected processes and one process",
    "fit": "A step of model.fit by ringtrain.keras, compared with unconnected processes",
    "loop": "ringtrain with logs, guards and a checkpoint every 100 steps, compared with a loop that only trains",
    "allreduce": "A sum over all ranks: three of the sizes from 4 KiB to 256 MiB",
    "input": "Real data compared with synthetic data; reading alone",
    "startup": "From the command to the end of the first step",
    "checkpoint": "A save every 100 steps compared with none; what the training waits for it",
    "guards": "The guards that flags turn off, on and off",
    "settings": "Each variable that ringtrain sets compared with another value of it",
}
HEAD = """\
# Benchmarks

Each table shows how many times as fast the first of two contenders is as the second: the median of the pairs, one in
each round, and an interval that contains the true median with at least 94 %. Above 1 the first is faster.
[benchmarks/README.md](../benchmarks/README.md) explains each contender; the most important are:

- `bound`: the same processes without communication; `bound_looped`: with 20 steps in a call
- `minimal`: a hand-written Horovod loop with ringtrain's cores, threads and variables; `minimal_stock`: without them
- `NAME_again`: the same contender a second time (A/A), which shows the noise

The models are CNN (the CIFAR-10 tutorial's network), WIDE (a perceptron of 21.9 M parameters), MANY (300 small
tensors), TINY (a step of 1 to 3 ms) and TRANSFORMER; WIDE_ADAM and MANY_ADAM are the same with Adam.
`python -m benchmarks show FILE` prints a result file with its command, commit and machine.
"""


def make_page(results: Mapping[str, Result]) -> str:
    """Return Markdown; ``results``: by file name."""
    sections = [HEAD]
    for mode, question in QUESTIONS.items():
        names = [name for name in results if mode_of(name) == mode]
        if not names:
            continue
        files = ", ".join(f"`results/{name}.json`" for name in names)
        rows = [row for name in names for row in _page_rows(results[name])]
        sections.append(f"## {question}\n\n{files}\n\n{_markdown(rows)}\n")
    missing = [f"`{mode}`" for mode in QUESTIONS if mode not in map(mode_of, results)]
    if missing:
        sections.append(f"## Not measured yet\n\n{', '.join(missing)}\n")
    return "\n".join(sections)


def _page_rows(result: Result) -> list[list[str]]:
    """Return experiment, contenders, ratio, interval and number of pairs of each comparison."""
    return [
        [experiment["name"], *row[:3], row[3].partition(" ")[0]]
        for experiment in result["experiments"]
        for comparison in experiment["comparisons"]
        for row in _ratio_rows(experiment, comparison)[:: SIZE_STRIDE if experiment["num_bytes"] else 1]
        if len(row) > 2
    ]


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head = ["experiment", "compared", "times as fast", "interval", "pairs"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def read_results(directory: Path) -> dict[str, Result]:
    """Read files such as ``bench-step.json`` and ``bench-step-WIDE.json``, by name."""
    paths = sorted(path for path in directory.glob("bench-*.json") if mode_of(path.stem) in QUESTIONS)
    return {path.stem: read_result(path) for path in paths}


def read_result(path: Path) -> Result:
    """Raise OSError or ValueError for other files."""
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    return result


def mode_of(name: str) -> str:
    """A measurement may have several files, such as ``bench-step-WIDE``."""
    return name.removeprefix("bench-").partition("-")[0]


def describe_result(result: Result) -> list[str]:
    machine = result["machine"]
    changed = ", with changes" if result["is_changed"] else ""
    lines = [
        f"{result['command']}",
        f"commit {result['commit']}{changed}; {machine['processor']}, {machine['cores']} cores, {result['size']} ranks",
        f"load {result['load_before'][0]} before, {result['load_after'][0]} after",
    ]
    for experiment in result["experiments"]:
        lines += ["", *describe_experiment(experiment, result["size"])]
    return [*lines, "", *describe_faults(result)]


def describe_experiment(experiment: Result, size: int) -> list[str]:
    rounds = len(experiment["rounds"])
    unit = "microseconds" if experiment["num_bytes"] else "milliseconds"
    lines = [f"{experiment['name']}: {unit} of {experiment['unit']} over {rounds} rounds"]
    for label in list_labels(experiment):
        rows = [["", "median", "quartiles", "min", "max", *(["GB/s on the bus"] if experiment["num_bytes"] else [])]]
        for name in experiment["contenders"]:
            values = read_right_figures(experiment, name, label)
            rows.append([name, *(_figures(values, experiment, label, size) if values else ["nothing"])])
        heading = [f"  {format_bytes(experiment['num_bytes'][label])}"] if experiment["num_bytes"] else []
        lines += [*heading, *align(rows)]
    ratios = [row for each in experiment["comparisons"] for row in _ratio_rows(experiment, each)]
    if not ratios:  # all runs failed, or no chosen contenders are compared
        return lines
    return [*lines, "  times as fast as (paired by round; the interval holds the true median)", *align(ratios)]


def describe_faults(result: Result) -> list[str]:
    faults, missing = find_faults(result), find_missing(result)
    num_runs = sum(len(each["runs"]) for experiment in result["experiments"] for each in experiment["rounds"])
    if not faults and not missing:
        return [f"all {num_runs} runs ended well and were checked"]
    heading = [f"{len(faults)} of {num_runs} runs failed or were wrong:"] if faults else []
    return [*heading, *(f"  {fault}" for fault in faults), *missing]


def find_missing(result: Result) -> list[str]:
    """Describe each incomplete experiment in a line."""
    lines = []
    for experiment in result["experiments"]:
        whole = [each for each in experiment["rounds"] if set(each["runs"]) == set(experiment["contenders"])]
        if len(whole) < experiment["rounds_wanted"]:
            lines.append(f"{experiment['name']}: {len(whole)} of {experiment['rounds_wanted']} rounds were run")
    return lines


def list_labels(experiment: Result) -> list[str]:
    runs = [run for each in experiment["rounds"] for run in each["runs"].values()]
    return list(dict.fromkeys(label for run in runs for label in run.get("figures", ())))


def read_figures(experiment: Result, name: str, label: str) -> list[float | None]:
    """Return seconds in each round; None if it failed or was wrong."""
    runs = [each["runs"].get(name, {"fault": "not run yet"}) for each in experiment["rounds"]]
    return [None if run["fault"] else run["figures"][label] for run in runs]


def read_right_figures(experiment: Result, name: str, label: str) -> list[float]:
    return [value for value in read_figures(experiment, name, label) if value is not None]


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the first column to the left, others to the right."""
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
    return [
        "  " + "  ".join(cell.ljust(width) if not column else cell.rjust(width)
                         for column, (cell, width) in enumerate(zip(row, widths, strict=False))).rstrip()
        for row in rows
    ]  # fmt: skip


def format_bytes(num_bytes: int) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes // scale} {unit}"
    return f"{num_bytes} bytes"


def _figures(values: Sequence[float], experiment: Result, label: str, size: int) -> list[str]:
    """Return median, quartiles and ends; of an all-reduce also the bandwidth."""
    scale = 1e6 if experiment["num_bytes"] else 1e3
    spread = describe_spread([scale * value for value in values])
    cells = [
        f"{spread.median:.4g}", f"{spread.lower_quartile:.4g} to {spread.upper_quartile:.4g}",
        f"{spread.min:.4g}", f"{spread.max:.4g}",
    ]  # fmt: skip
    if experiment["num_bytes"]:
        cells.append(f"{bus_bandwidth(experiment['num_bytes'][label], spread.median / scale, size) / 1e9:.3g}")
    return cells


def _ratio_rows(experiment: Result, comparison: Result) -> list[list[str]]:
    rows = []
    for label in list_labels(experiment):
        ratios = paired_ratios(*(read_figures(experiment, comparison[side], label) for side in ("other", "name")))
        where = f", {format_bytes(experiment['num_bytes'][label])}" if experiment["num_bytes"] else ""
        name = f"{comparison['name']} / {comparison['other']}{where}"
        if not ratios:
            rows.append([name, "not measured"])
            continue
        spread = describe_spread(ratios)
        goal = comparison["goal"]
        reached = "reached" if goal is not None and spread.median >= goal else "missed"
        rows.append(
            [
                name,
                f"{spread.median:.3f}",
                f"{spread.low:.3f}-{spread.high:.3f}",
                f"{spread.count} pairs ({100 * spread.confidence:.0f} %)",
                f"goal {goal:.3f} {reached}" if goal is not None else "",
            ]
        )
    return rows
