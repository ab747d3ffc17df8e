"""Train with more and more ranks on this machine, and fit how each cost grows.

    python -m benchmarks.scale --sizes 2,4,8,16,32 --light 2,8,32,128,512

Each cost is fitted by a + b log2(n) + c n, and extrapolated to 1,024 ranks with the interval of 95 %. Ranks share the
cores: their seconds are the work of one machine for all ranks, and not what a cluster takes. Bytes, messages, sockets
and threads are those of a cluster. Light ranks have a watchdog and no TensorFlow (``hub.py``). It writes
results/scale.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import hub
from benchmarks.children import clean_environment
from benchmarks.origin import describe_commit, describe_machine

RESULT = Path("results/scale.json")
RANK = Path(__file__).parent / "own_phases.py"
STEPS, EXTRAPOLATED, TIMEOUT_SECONDS = 20, 1024, 900
T_QUANTILES = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}  # 0.975, by degrees of freedom
# What follows the first moment of each phase on rank 0, in this order.
PHASES = {
    "python": "imports",
    "JOIN": "joining",
    "PREPARE": "data",
    "COMPILE": "model and step",
    "RESTORE": "first values",
    "DATA": "first step",
}


def measure(size: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="ringtrain-scale-") as name:
        directory = Path(name)
        begin = time.time()
        rank = [sys.executable, str(RANK), name, str(begin), "train", "--workload", "digits", "--steps", str(STEPS)]
        launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(size)]
        command = [*launcher, *rank, "--batch_size", "4", "--log_every", "5", "--out", str(directory / "run")]
        env = clean_environment(os.environ, programs=Path(sys.executable).parent)
        done = subprocess.run(command, env=env, check=True, timeout=TIMEOUT_SECONDS, capture_output=True, text=True)
        ranks = [json.loads((directory / f"{number}.json").read_text()) for number in range(size)]
        events = [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]
    first = ranks[0]
    moments = {
        phase: next(at for at, its, _ in first["phases"] if its == phase)
        for phase in PHASES
        if phase in {its for _, its, _ in first["phases"]}
    }
    second_step = next(at for at, _, step in first["phases"] if step == 2)
    ordered = [*moments.values(), second_step]
    phases = {
        f"seconds of {PHASES[phase]}": later - moments[phase] for phase, later in zip(moments, ordered[1:], strict=True)
    }
    return {
        "ranks": size,
        "seconds to the second step": second_step,
        "seconds of launcher": moments["python"],
        **phases,
        "seconds in all": time.time() - begin,
        "CPU seconds of a rank": float(np.mean([each["cpu_sec"] for each in ranks])),
        "control messages of a rank": sum(first["calls"].values()),
        "control bytes that a rank receives": sum(first["received"].values()),
        "sockets of rank 0": first["sockets"],
        "threads of rank 0": first["threads"],
        "lines of output": len(done.stdout.splitlines()) + len(done.stderr.splitlines()),
        "seconds of a save": max(event["seconds"] for event in events if event["event"] == "checkpoint"),
    } | {f"bytes of {name}": value for name, value in first["received"].items()}


def fit(sizes: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    """Least squares; the interval supposes normal errors."""
    design = np.stack([np.ones(len(sizes)), np.log2(sizes), np.array(sizes, float)], axis=1)
    factors, *_ = np.linalg.lstsq(design, np.array(values), rcond=None)
    freedom = len(sizes) - design.shape[1]
    at = np.array([1.0, np.log2(EXTRAPOLATED), EXTRAPOLATED])
    expected, width = float(at @ factors), float("nan")
    if freedom > 0:
        variance = float(np.sum((design @ factors - values) ** 2)) / freedom
        width = T_QUANTILES.get(freedom, 2.6) * float(
            np.sqrt(variance * (1 + at @ np.linalg.pinv(design.T @ design) @ at))
        )
    return {"a": factors[0], "b": factors[1], "c": factors[2], str(EXTRAPOLATED): expected, "plus_minus": width}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="2,4,8,16,32")
    parser.add_argument("--light", default="2,8,32,128,512")
    options = parser.parse_args(arguments)
    tables: list[list[dict[str, float]]] = []
    for measure_one, sizes in ((measure, options.sizes), (hub.measure, options.light)):
        tables.append([])
        for size in sizes.split(","):
            row = measure_one(int(size))
            print({name: round(value, 3) for name, value in row.items() if not name.startswith("bytes of")}, flush=True)
            tables[-1].append(row)
    fits = {
        name: fit([int(row["ranks"]) for row in rows], [row[name] for row in rows])
        for rows in tables
        for name in rows[0]
        if name != "ranks" and all(name in row for row in rows)
    }
    rows, light = tables
    origin = {"command": " ".join(["python -m benchmarks.scale", *arguments]), **describe_commit()}
    result = origin | {"machine": describe_machine(), "rows": rows, "light": light, "fits": fits}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for name, its in fits.items():
        print(f"{name:44} {its['a']:9.3g} + {its['b']:9.3g} log2(n) + {its['c']:9.3g} n: {its['1024']:9.4g} at 1,024")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
