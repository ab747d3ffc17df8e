"""Forecast the speed of a training on more nodes of a cluster, with an interval.

It takes the time of a step and the sizes of gradients from a run or from flags. The cluster has to
be named: a preset (dgxa100, dgxh100, dgx1, dgx1v, dgx2, p4d, roce25, tcp25, tcp10) or a YAML file.
It first prints what it assumes. One process, at the top of a checkout.

    python -m benchmarks.forecast runs/digits --cluster p4d --nodes 64
    python -m benchmarks.forecast --cluster p4d --step_sec 1 --batch_size 64 --parameters 25600000
    python -m benchmarks.forecast runs/digits --cluster my_cluster.yaml --output forecast.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.forecast.cluster import Cluster, find_cluster
from benchmarks.forecast.fields import (
    MAX_PARAMETERS,
    Field,
    Number,
    Source,
    Table,
    read_fields,
)
from benchmarks.forecast.measured import SAMPLES, STEP_SECONDS, Measurement, count, measure
from benchmarks.forecast.model import (
    SCENARIOS,
    Forecast,
    Scenario,
    Work,
    find_compute,
    forecast,
    last_worthwhile,
    uniform,
)
from benchmarks.writing import explaining_files
from ringtrain.cli import run_command
from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import refuse_launcher
from ringtrain.errors import UsageError
from ringtrain.files.atomic import replace_text
from ringtrain.files.outputs import require_same_kind
from ringtrain.messages.escaping import escape
from ringtrain.runtime.world import World

MAX_NODES = 4096
FORMAT = 1
FORMAT_KEY = "ringtrain_forecast"
COLUMNS = (
    "nodes", "devices", "examples/s", "from", "to", "efficiency", "exposed ms", "hours",
    "node-hours",
)  # fmt: skip
FLAGS: Table = {
    "nodes": Field(Number(least=1, most=MAX_NODES, is_whole=True)),
    "step_sec": Field(STEP_SECONDS, is_required=False),
    "batch_size": Field(SAMPLES, is_required=False),
    "global_batch_size": Field(SAMPLES, is_required=False),
    "parameters": Field(Number(least=1, most=MAX_PARAMETERS, is_whole=True), is_required=False),
    "samples": Field(Number(least=1, most=10**18, is_whole=True), is_required=False),
    "input_rate": Field(Number(least=1e-6, most=10**12), is_required=False),
    "variation": Field(Number(least=0, most=0.5, hint="usually 0.01 to 0.08"), is_required=False),
}
WITHOUT_RUN = ("step_sec", "batch_size", "parameters")

Row = Mapping[str, Forecast]  # by scenario


@dataclass(frozen=True)
class Options:
    """Words and flags of the command."""

    run: Path | None = None
    """directory of a run that has measured steps"""

    _: KW_ONLY

    cluster: str
    """a preset, or a YAML file with all numbers of a cluster; required"""

    nodes: int = 64
    """most nodes of the forecast"""

    step_sec: float | None = None
    """seconds of a step on one device (of the run)"""

    batch_size: int | None = None
    """samples of a device in a step (of the run)"""

    global_batch_size: int | None = None
    """samples of all devices in a step, which share them (each device keeps its number)"""

    parameters: int | None = None
    """trainable numbers, with gradients of 4 bytes each (by variable, of the run)"""

    samples: int | None = None
    """samples of the whole training, for the hours (of the run)"""

    input_rate: float | None = None
    """samples per second that a device's input delivers at most (no limit)"""

    variation: float | None = None
    """standard deviation of the devices' compute over its mean (0 to 0.08, 0.025 expected)"""

    output: Path | None = None
    """JSON file for the forecast"""


def main(arguments: Sequence[str], world: World) -> int:
    """Print what is assumed, the forecast as a table, and write the file."""
    options = Options(**parse_arguments(Options, arguments, world))
    refuse_launcher("benchmarks.forecast", world)
    cluster = find_cluster(options.cluster)
    check(options, cluster)
    measurement = choose_work(options, cluster)
    scenarios = choose_scenarios(options)
    assumptions = describe_assumptions(options, cluster, measurement, scenarios)
    print("The forecast assumes:")
    print_lines(assumptions)

    rows = forecast_nodes(options, cluster, measurement.work, scenarios)
    num_worthwhile = last_worthwhile([row["expected"].examples_per_sec for row in rows])
    shown = [rows[nodes - 1] for nodes in shown_nodes(options.nodes)]
    print_table(shown, cluster, measurement.samples)
    notes = describe_limits(shown)
    nodes = count(options.nodes, "node")
    notes.append(f"the last of {nodes} that adds at least half of the first's rate: {num_worthwhile}")
    print_lines(notes)
    if options.output is not None:
        facts = {
            FORMAT_KEY: FORMAT,
            "cluster": asdict(cluster),
            "work": asdict(measurement.work),
            "assumptions": assumptions,
            "notes": notes,
            "rows": [as_plain(row) for row in shown],
        }
        write(options.output, facts)
    return 0


def check(options: Options, cluster: Cluster) -> None:
    """Raise UsageError for wrong or missing flags, and for an output of another kind."""
    flags = {name: getattr(options, name) for name in FLAGS}
    read_fields(FLAGS, flags, Source(name="", error=UsageError))
    devices = options.nodes * cluster.devices_per_node
    if options.global_batch_size is not None and options.global_batch_size < devices:
        raise UsageError(
            f"global_batch_size is {options.global_batch_size}, less than the {devices} devices. "
            "Lower --nodes, or raise it."
        )
    missing = [name for name in WITHOUT_RUN if flags[name] is None]
    if options.run is None and missing:
        flags_missing = " and ".join(f"--{name}" for name in missing)
        raise UsageError(f"{missing[0]} is missing. Give the directory of a run, or {flags_missing}.")
    if options.run is not None and options.batch_size is not None and options.step_sec is None:
        remedy = "Give --step_sec, or --global_batch_size."
        raise UsageError(f"batch_size is given without the time of its steps. {remedy}")
    if options.output is not None:
        mark = f'"{FORMAT_KEY}"'.encode()
        require_same_kind(options.output, mark, kind="a forecast")


def choose_work(options: Options, cluster: Cluster) -> Measurement:
    """Return the run's measurements, with those flags in their place that are given."""
    changes: dict[str, Any] = {}
    if options.step_sec is not None:
        changes |= {"step_sec": options.step_sec, "compute_sec": None, "measured_on": 1}
    if options.batch_size is not None:
        changes["batch_size"] = options.batch_size
    if options.input_rate is not None:
        changes["input_rate"] = options.input_rate
    if options.parameters is not None:
        changes["shapes"] = uniform(options.parameters)
    if options.run is None:
        return Measurement(Work(**changes), options.samples or 0, [])
    measurement = measure(options.run, cluster)
    return measurement._replace(
        work=replace(measurement.work, **changes),
        samples=options.samples or measurement.samples,
    )


def choose_scenarios(options: Options) -> dict[str, Scenario]:
    """Return the scenarios by name, with the variation that is given."""
    if options.variation is None:
        return dict(SCENARIOS)
    scenarios = {}
    for name, scenario in SCENARIOS.items():
        scenarios[name] = scenario._replace(variation=options.variation)
    return scenarios


def describe_assumptions(
    options: Options,
    cluster: Cluster,
    measurement: Measurement,
    scenarios: Mapping[str, Scenario],
) -> list[str]:
    """Return all that the forecast assumes, a line each."""
    work = measurement.work
    lines = [f"cluster {options.cluster}: {cluster.describe()}", *measurement.assumptions]
    if options.step_sec is not None:
        lines.append(f"--step_sec was measured on one of the cluster's {cluster.device_words}")
    if options.parameters is not None:
        lines.append(f"the parameters are in {len(work.shapes)} equal variables")
    lines.append(f"a gradient travels in {work.value_bytes} bytes for each parameter")
    if options.global_batch_size is None:
        lines.append(f"each device has {work.batch_size:g} samples a step, however many there are")
    else:
        lines.append(f"{options.global_batch_size} samples a step are shared by all devices")
    if work.input_rate is None:
        lines.append("input is as fast as in the measured step")
    if not (work.save_every and work.save_sec):
        lines.append("checkpoints take no time")
    lines.append("evaluation takes no time, and no other job uses the network")
    names = {"low": "from", "expected": "expected", "high": "to"}
    for scenario, name in names.items():
        lines.append(f"{name}: {scenarios[scenario].describe()}")
    return lines


def forecast_nodes(
    options: Options, cluster: Cluster, work: Work, scenarios: Mapping[str, Scenario]
) -> list[dict[str, Forecast]]:
    """Return the forecasts for 1 node, 2, and so on."""
    work_by_scenario = {}
    for name, scenario in scenarios.items():
        compute_sec = find_compute(work, cluster, scenario)
        work_by_scenario[name] = replace(work, compute_sec=compute_sec, measured_on=1)
    rows = []
    for nodes in range(1, options.nodes + 1):
        devices = nodes * cluster.devices_per_node
        batch_size = None
        if options.global_batch_size is not None:
            batch_size = options.global_batch_size / devices
        row = {}
        for name, scenario in scenarios.items():
            scenario_work = work_by_scenario[name]
            row[name] = forecast(scenario_work, cluster, devices, scenario, batch_size=batch_size)
        rows.append(row)
    return rows


def shown_nodes(most: int) -> list[int]:
    """Return the powers of two below a number of nodes, and the number itself."""
    powers = []
    nodes = 1
    while nodes < most:
        powers.append(nodes)
        nodes *= 2
    return [*powers, most]


def print_table(rows: Sequence[Row], cluster: Cluster, samples: int) -> None:
    """Print a line for each row; ``samples``: of the whole training, 0: unknown."""
    lines: list[tuple[str, ...]] = [COLUMNS]
    for row in rows:
        lines.append(tuple(format_row(row, cluster.devices_per_node, samples)))
    for line in lines:
        cells = []
        for cell, title in zip(line, COLUMNS, strict=True):
            cells.append(cell.rjust(len(title)))
        print("  ".join(cells))


def format_row(row: Row, devices_per_node: int, samples: int) -> Iterator[str]:
    """Yield the cells of a row."""
    expected = row["expected"]
    nodes = expected.devices // devices_per_node
    yield str(nodes)
    yield str(expected.devices)
    for name in ("expected", "low", "high"):
        yield f"{row[name].examples_per_sec:,.0f}"
    yield f"{expected.efficiency:.0%}"
    yield f"{1000 * expected.exposed_sec:.1f}"
    if samples:
        hours = samples / expected.examples_per_sec / 3600
        yield f"{hours:.2f}"
        yield f"{nodes * hours:.1f}"
    else:
        yield "-"
        yield "-"


def describe_limits(rows: Sequence[Row]) -> list[str]:
    """Return a line if input or checkpoints limit the expected speed."""
    limited = [str(row["expected"].devices) for row in rows if row["expected"].is_limited]
    if not limited:
        return []
    devices = ", ".join(limited)
    return [f"steps wait for input, or for checkpoints to be written, on {devices} devices"]


def print_lines(lines: Sequence[str]) -> None:
    """Print indented lines."""
    for line in lines:
        print(escape(f"  {line}"))


def as_plain(row: Row) -> dict[str, dict[str, Any]]:
    """Return a row for JSON."""
    return {name: each._asdict() for name, each in row.items()}


def write(output: Path, facts: Mapping[str, Any]) -> None:
    """Replace the output by the forecast. Raises UsageError if it cannot be written."""
    with explaining_files(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        replace_text(output, json.dumps(facts, indent=1) + "\n")
    print(escape(f"the forecast is in {output}"))


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:], program="benchmarks"))
