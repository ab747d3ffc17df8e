"""Forecast the speed of a training on more nodes, with an interval.

It takes the time of a step and the sizes of gradients from a run or from flags, and the cluster
from a preset (dgxa100, dgxh100, dgx1, dgx1v, dgx2, p4d, roce25, tcp25, tcp10), whose numbers
--cluster.NAME replaces. One process.

    python -m ringtrain predict runs/digits --preset p4d --nodes 64
    python -m ringtrain predict --step_sec 1 --batch_size 64 --parameters 25600000
    python -m ringtrain predict runs/digits --cluster.node_gbit 100
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import refuse_launcher
from ringtrain.errors import UsageError
from ringtrain.files.atomic import replace_text
from ringtrain.messages.escaping import escape
from ringtrain.messages.rules import did_you_mean
from ringtrain.predict.cluster import PRESETS, Cluster
from ringtrain.runtime.world import World

if TYPE_CHECKING:
    from ringtrain.predict.forecast import Forecast, Work

MAX_NODES = 4096
POSITIVE = ("nodes", "step_sec", "batch_size", "global_batch_size", "parameters", "samples", "input_rate")
COLUMNS = ("nodes", "devices", "examples/s", "from", "to", "efficiency", "exposed ms", "hours", "node-hours")


@dataclass(frozen=True)
class Options:
    run: Path | None = None
    """directory of a run that has measured steps"""

    _: KW_ONLY

    preset: str = "dgxa100"
    """cluster whose numbers are used where --cluster gives none"""

    cluster: Cluster = field(default_factory=Cluster)

    nodes: int = 64
    """most nodes of the forecast"""

    step_sec: float | None = None
    """seconds of a step on one device (of the run)"""

    batch_size: int | None = None
    """samples of a device in a step (of the run)"""

    global_batch_size: int | None = None
    """samples of all devices in a step: more devices get fewer each (each device keeps its number)"""

    parameters: int | None = None
    """trainable numbers, with gradients of 4 bytes each (by variable, of the run)"""

    samples: int | None = None
    """samples of the whole training, for the hours (of the run)"""

    input_rate: float | None = None
    """samples per second that a device's input delivers at most (no limit)"""

    variation: float | None = None
    """standard deviation of the devices' compute in a step, over its mean (0 to 0.08, 0.025 expected)"""

    out: Path | None = None
    """directory for the forecast as JSON and as a picture"""


def main(arguments: Sequence[str], world: World) -> int:
    given = parse_arguments(Options, arguments, world)
    refuse_launcher("predict", world)
    preset = given.get("preset", Options.preset)
    if preset not in PRESETS:
        raise UsageError(f"preset is {preset!r}. {did_you_mean(preset, PRESETS)}Presets: {', '.join(PRESETS)}.")
    options = Options(**given | {"cluster": replace(PRESETS[preset], **given.get("cluster", {}))})
    check(options)
    from ringtrain.predict.forecast import SCENARIOS, find_compute, forecast, last_worthwhile

    work, samples, notes = choose_work(options)
    variation = {} if options.variation is None else {"variation": options.variation}
    scenarios = {name: scenario._replace(**variation) for name, scenario in SCENARIOS.items()}
    works = {
        name: replace(work, compute_sec=find_compute(work, options.cluster, scenario), measured_on=1)
        for name, scenario in scenarios.items()
    }

    def of(nodes: int, name: str) -> Forecast:
        devices = nodes * options.cluster.devices_per_node
        batch_size = None if options.global_batch_size is None else options.global_batch_size / devices
        return forecast(works[name], options.cluster, devices, scenarios[name], batch_size=batch_size)

    powers = [2**power for power in range(MAX_NODES.bit_length()) if 2**power < options.nodes]
    rows = [{name: of(nodes, name) for name in scenarios} for nodes in (*powers, options.nodes)]
    lines = [COLUMNS, *(format_row(row, options.cluster.devices_per_node, samples) for row in rows)]
    for line in lines:
        print("  ".join(cell.rjust(len(title)) for cell, title in zip(line, COLUMNS, strict=True)))
    last = last_worthwhile([of(nodes, "expected").examples_per_sec for nodes in range(1, options.nodes + 1)])
    limited = [row["expected"] for row in rows if row["expected"].is_limited]
    if limited:
        devices = ", ".join(str(each.devices) for each in limited)
        notes.append(f"steps wait for input, or for checkpoints to be written, on {devices} devices")
    notes.append(f"the last of {options.nodes} nodes that adds at least half of the first's rate: {last}")
    print("\n".join(escape(f"  {note}") for note in notes))
    if options.out is not None:
        write(options.out, rows, {"cluster": asdict(options.cluster), "work": asdict(work), "notes": notes})
    return 0


def check(options: Options) -> None:
    for name in POSITIVE:
        if (value := getattr(options, name)) is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} is {value}; it must be a finite number above 0.")
    if options.nodes > MAX_NODES:
        raise UsageError(f"nodes is {options.nodes}; it must be at most {MAX_NODES}.")
    devices, batch = options.nodes * options.cluster.devices_per_node, options.global_batch_size
    if batch is not None and batch < devices:
        raise UsageError(f"global_batch_size is {batch}, less than the {devices} devices. Lower --nodes, or raise it.")
    if options.variation is not None and not 0 <= options.variation < 1:
        raise UsageError(f"variation is {options.variation}; it must be from 0 to 1, usually 0.01 to 0.08.")
    missing = [name for name in ("step_sec", "batch_size", "parameters") if getattr(options, name) is None]
    if options.run is not None and options.batch_size is not None and options.step_sec is None:
        raise UsageError("batch_size is given without the time of its steps. Give --step_sec, or --global_batch_size.")
    if missing and options.run is None:
        raise UsageError(f"{missing[0]} is missing. Give the directory of a run, or --{' and --'.join(missing)}.")


def choose_work(options: Options) -> tuple[Work, int, list[str]]:
    """Return work, samples of the whole training (0: unknown) and notes."""
    from ringtrain.predict.forecast import Work
    from ringtrain.predict.measured import measure, uniform

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
        return Work(**changes), options.samples or 0, ["step, batch and parameters as given, on one device"]
    work, samples, notes = measure(options.run)
    return replace(work, **changes), options.samples or samples, notes


def format_row(row: Mapping[str, Forecast], devices_per_node: int, samples: int) -> tuple[str, ...]:
    expected, low, high = row["expected"], row["low"], row["high"]
    nodes, hours = expected.devices // devices_per_node, samples / expected.examples_per_sec / 3600
    return (
        str(nodes),
        str(expected.devices),
        *(f"{each.examples_per_sec:,.0f}" for each in (expected, low, high)),
        f"{expected.efficiency:.0%}",
        f"{1000 * expected.exposed_sec:.1f}",
        *((f"{hours:.2f}", f"{nodes * hours:.1f}") if samples else ("-", "-")),
    )


def write(directory: Path, rows: Sequence[Mapping[str, Forecast]], facts: dict[str, Any]) -> None:
    import plotly.graph_objects as go  # type: ignore[import-untyped]

    forecasts = [{name: each._asdict() for name, each in row.items()} for row in rows]
    devices = [row["expected"].devices for row in rows]
    rates = {name: [row[name].examples_per_sec for row in rows] for name in ("low", "high", "expected")}
    figure = go.Figure(layout={"title": "Forecast", "template": "plotly_white"})
    for name, fill in (("low", None), ("high", "tonexty"), ("expected", None)):
        figure.add_scatter(x=devices, y=rates[name], name=name, fill=fill)
    figure.update_xaxes(type="log", title="devices")
    figure.update_yaxes(type="log", title="examples/s")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_text(directory / "forecast.json", json.dumps(facts | {"rows": forecasts}, indent=1))
        replace_text(directory / "forecast.html", figure.to_html(include_plotlyjs=True))
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}. Give another directory with --out.") from None
    print(f"picture: {directory / 'forecast.html'}")
