"""Compare forecasts with published rates of other programs.

    python -m benchmarks.predictions

Each series of ``published_scaling.csv`` is fitted on its smallest size; the others are forecast. It writes
results/predictions.json. Layers are those of Keras' models; BERT is taken as 50 equal parts.
"""

from __future__ import annotations

import csv
import functools
import json
import re
import statistics
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.forecast.cluster import PRESETS, Cluster
from benchmarks.forecast.model import SCENARIOS, Work, forecast, uniform

PUBLISHED = Path(__file__).parent / "published_scaling.csv"
RESULT = Path("results/predictions.json")
PICTURE = Path("docs/scaling.svg")
COLOURS = ("#1f83c9", "#d4611a", "#12906a", "#c75f9f", "#a07c10", "#7a70e0")
CLUSTERS = {  # by words of the network
    "TCP": "tcp25",
    "25 Gbit/s": "roce25",
    "HDR": "dgxa100",
    "DGX A100": "dgxa100",
    "DGX-2": "dgx2",
    "DGX-1": "dgx1v",
    "NVLink": "dgx1",
}
# Published as shares of the ideal: docs/benchmarks.rst of Horovod.
SHARES = {"Inception V3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.68}
LAYERS = {
    "Inception V3": "InceptionV3",
    "ResNet-101": "ResNet101",
    "VGG-16": "VGG16",
    "VGG16": "VGG16",
    "ResNet-50": "ResNet50",
    "EfficientNet-B4": "EfficientNetB4",
}
WITHIN = 0.05


def compare(models: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Return one row for each size that is not fitted, of some models or all."""
    first: dict[str, tuple[int, float]] = {}
    rows = []
    for row in csv.DictReader(PUBLISHED.read_text(encoding="utf-8").splitlines()):
        model, devices = row["model"].partition(" (")[0], int(row["devices"])
        if models is not None and model not in models:
            continue
        series = " ".join([row["source"].split()[0], model, row["gpu"], row["precision"]])
        if row["examples_per_sec"]:
            rate = float(row["examples_per_sec"]) / devices
            if series not in first:
                first[series] = devices, rate
                continue
            efficiency = rate / first[series][1]
        else:
            efficiency = SHARES[model]
        rows.append(compare_row(row, model, first[series], efficiency))
    return rows


def compare_row(row: Mapping[str, str], model: str, measured: tuple[int, float], efficiency: float) -> dict[str, Any]:
    measured_on, rate = measured
    accumulate = int((re.findall(r"accumulation (\d+)", row["model"]) or ["1"])[0])
    batch_size = accumulate * int(row["batch_per_device"] or 64)
    work = Work(
        step_sec=batch_size / rate,
        shapes=shapes_of(model) or uniform(int(1e6 * float(row["parameters_millions"]))),
        value_bytes=2 if row["precision"] == "mixed" else 4,
        batch_size=batch_size,
        measured_on=measured_on,
        accumulate=accumulate,
    )
    cluster = cluster_of(row["network"])
    found = {name: forecast(work, cluster, int(row["devices"]), each).efficiency for name, each in SCENARIOS.items()}
    return {
        **{name: row[name] for name in ("source", "model", "devices", "gpu", "network")},
        "measured_on": measured_on,
        "efficiency": round(efficiency, 4),
        **{name: round(value, 4) for name, value in found.items()},
        "is_within_5_points": abs(found["expected"] - efficiency) <= WITHIN,
        "is_in_interval": found["low"] <= efficiency <= found["high"],
        "simplest": round(simplest(work, cluster, int(row["devices"])), 4),
    }


def cluster_of(network: str) -> Cluster:
    return next(PRESETS[name] for words, name in CLUSTERS.items() if words in network)


@functools.cache
def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Return shapes of the trainable variables; none for a model that Keras has not."""
    if model not in LAYERS:
        return []
    import keras

    return [tuple(v.shape) for v in getattr(keras.applications, LAYERS[model])(weights=None).trainable_variables]


def simplest(work: Work, cluster: Cluster, devices: int) -> float:
    """Return the efficiency by compute and 2 (n - 1) / n times the bytes over the line rate, without overlap."""

    def communication(size: int) -> float:
        rate = (cluster.node_gbit if size > cluster.devices_per_node else cluster.device_gbit) * 1e9 / 8
        return 2 * (size - 1) / size * sum(work.gradient_bytes) / rate

    return work.step_sec / (work.step_sec - communication(work.measured_on) + communication(devices))


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    widths = [row["high"] - row["low"] for row in rows]
    near = [abs(row["simplest"] - row["efficiency"]) <= WITHIN for row in rows]
    return {
        "rows": len(rows),
        "within_5_points": sum(row["is_within_5_points"] for row in rows),
        "in_interval": sum(row["is_in_interval"] for row in rows),
        "median_width": round(statistics.median(widths), 4),
        "simplest_within_5_points": sum(near),
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        mark = "" if row["is_within_5_points"] else " *"
        what = f"{row['model'][:44]}, {row['devices']} x {row['gpu']}, {row['network'][:24]}"
        yield (
            f"{what:88} {row['efficiency']:.0%} published, {row['expected']:.0%} forecast "
            f"({row['low']:.0%} to {row['high']:.0%}){mark}"
        )


def draw(rows: list[dict[str, Any]]) -> str:
    """Return an SVG: forecast over published efficiency, with the interval of each forecast."""
    left, size, least = 60, 520, 0.35
    sources = dict(zip(dict.fromkeys(map(source_of, rows)), COLOURS, strict=True))

    def at(efficiency: float) -> float:
        return round(size * (efficiency - least) / (1 - least), 1)

    def x(efficiency: float) -> float:
        return left + at(efficiency)

    def y(efficiency: float) -> float:
        return 10 + size - at(efficiency)

    ends = {shift: (x(least), y(least + shift), x(1 - shift), y(1)) for shift in (0.0, WITHIN)}
    corners = [(x(least + WITHIN), y(least)), (x(1), y(1 - WITHIN)), ends[WITHIN][2:], ends[WITHIN][:2]]
    shapes = [f'<path d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in corners)}Z" fill="#eee"/>']
    shapes.append(f'<path d="M{x(least)} {y(least)}L{x(1)} {y(1)}" stroke="#999"/>')
    for tick in range(40, 101, 10):
        shapes.append(f'<text x="{x(tick / 100)}" y="{size + 28}" text-anchor="middle">{tick}%</text>')
        shapes.append(f'<text x="{left - 8}" y="{y(tick / 100) + 4}" text-anchor="end">{tick}%</text>')
    shapes.append(f'<text x="{left + size / 2}" y="{size + 48}" text-anchor="middle">published efficiency</text>')
    shapes.append(f'<text transform="translate(14 {10 + size / 2}) rotate(-90)" text-anchor="middle">forecast</text>')
    for row in rows:
        colour, where = sources[source_of(row)], x(row["efficiency"])
        path = f"M{where} {y(row['low'])}V{y(row['high'])}"
        shapes.append(f'<path d="{path}" stroke="{colour}" stroke-width="3" opacity="0.25"/>')
        shapes.append(f'<circle cx="{where}" cy="{y(row["expected"])}" r="3.5" fill="{colour}"/>')
    for number, (name, colour) in enumerate(sources.items()):
        height = y(0.6) + 20 * number
        shapes.append(f'<circle cx="{x(0.72)}" cy="{height}" r="5" fill="{colour}"/>')
        shapes.append(f'<text x="{x(0.72) + 12}" y="{height + 4}">{name}</text>')
    style = 'font-family="sans-serif" font-size="13" fill="#333"'
    body = "\n".join(['<rect width="100%" height="100%" fill="white"/>', *shapes])
    frame = f'width="{left + size + 20}" height="{size + 60}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {frame} {style}>\n{body}\n</svg>\n'


def source_of(row: Mapping[str, Any]) -> str:
    first, second, *_ = str(row["source"]).split()
    return {"horovod": "Horovod", "TensorFlow": "TensorFlow", "NVIDIA": "BERT, EfficientNet-B4"}.get(first, second)


def main() -> int:
    rows = compare()
    summary = summarize(rows)
    RESULT.write_text(
        json.dumps({"command": "python -m benchmarks.predictions", **summary, "table": rows}, indent=1) + "\n"
    )
    PICTURE.write_text(draw(rows))
    print("\n".join([*table(rows), json.dumps(summary)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
