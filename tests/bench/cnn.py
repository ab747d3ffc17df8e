"""ringtrain on two cores against two unconnected plain TensorFlow processes pinned to a core each (the bound).

    python -m tests.bench.cnn --rounds 7 --out tests/bench/results/cnn.json

Interleaves rounds of ``horovodrun -np 2 python -m ringtrain`` (stock: no setting in the environment), of the bound, and
of the bound again (A/A: how noisy the machine is), and writes examples per second with the ratios pair by pair. Each
figure stands beside the last loss, which must be finite and below the loss of guessing plus noise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LARGEST_RIGHT_LOSS = 2.6  # random labels: ln 10 = 2.30 and the noise of one batch
TIMEOUT_SECONDS = 300
ROOT = Path(__file__).parents[2]


def run_bound(steps: int, warm_up_steps: int) -> tuple[float, list[float]]:
    """Examples per second of both processes together, and their last losses."""
    command = [sys.executable, "-m", "tests.bench.plain_tensorflow"]
    processes = [
        subprocess.Popen(
            [*command, str(core), str(steps), str(warm_up_steps)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for core in sorted(os.sched_getaffinity(0))[:2]
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_SECONDS)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
    return sum(float(speed) for speed, _ in outputs), [float(loss) for _, loss in outputs]


def run_ringtrain(steps: int, warm_up_steps: int) -> tuple[float, list[float]]:
    """Examples per second over both ranks, and the last loss, from metrics.jsonl."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        workload = str(ROOT / "tests/bench/tutorial_cnn.py") + ":TutorialCNN"
        horovodrun = shutil.which("horovodrun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        flags = ["--workload", workload, "--steps", str(steps), "--log_every", str(warm_up_steps), "--out", str(out)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "OMPI_"))}
        subprocess.run(
            [str(horovodrun), "-np", "2", sys.executable, "-m", "ringtrain", *flags],
            check=True,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_SECONDS,
        )
        events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = [event for event in events if event["event"] == "train"][1:]  # the first interval is the warm-up
    samples = 256 * warm_up_steps * len(timed)
    return samples / sum(event["sec_per_step"] * warm_up_steps for event in timed), [timed[-1]["loss"]]


def summarize(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--warm_up_steps", type=int, default=30, help="must divide steps")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    for number in range(args.rounds):
        runs = {
            name: run(args.steps, args.warm_up_steps)
            for name, run in (("bound", run_bound), ("ringtrain", run_ringtrain), ("bound_again", run_bound))
        }
        losses = [loss for _, both in runs.values() for loss in both]
        if not all(math.isfinite(loss) and loss < LARGEST_RIGHT_LOSS for loss in losses):
            sys.exit(f"round {number + 1}: a loss is wrong: {losses}")
        rounds.append({name: round(speed, 1) for name, (speed, _) in runs.items()} | {"losses": losses})
        print(f"round {number + 1}: {rounds[-1]}", flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(describe(args, rounds), indent=2) + "\n")
    print(json.dumps({key: value for key, value in describe(args, rounds).items() if key != "rounds"}, indent=2))


def describe_origin(command: str) -> dict[str, str]:
    """Where a result comes from: the command, the commit and the machine."""
    linux = platform.release().split("-")[0]
    commit = ["git", "rev-parse", "--short", "HEAD"]
    return {
        "command": command,
        "commit": subprocess.run(commit, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {linux}",
    }


def describe(args: argparse.Namespace, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """What the result file holds."""
    flags = f"--rounds {len(rounds)} --steps {args.steps} --warm_up_steps {args.warm_up_steps}"
    return {
        **describe_origin(f"python -m tests.bench.cnn {flags} --out {args.out.name}"),
        "unit": "examples per second, 2 processes of local batch 128",
        "ringtrain over bound": summarize([2 * r["ringtrain"] / (r["bound"] + r["bound_again"]) for r in rounds]),
        "bound over bound again (A/A)": summarize([r["bound"] / r["bound_again"] for r in rounds]),
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
