"""The share of steps in which the sums overlap with the backward pass, by Horovod's own timeline.

    python -m benchmarks.overlap [RUNS]

It trains the CIFAR-10 tutorial's network on two ranks, and counts the steps in which the first group of
gradients was reduced before the last one was ready, and those in which the control vector was reduced
before the last group. Other work on the machine changes the result: where it takes a core from one
rank, the other waits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.children import clean_environment

STEPS = 20
RUNS = 3
TIMEOUT_SECONDS = 200
FLAGS = ["--workload", "benchmarks.workloads:CNN", "--batch_size", "32", "--backend", "horovod"]


class Overlap(NamedTuple):
    """Shares of steps, from 0 to 1."""

    first_group: float  # reduced before the last group was ready
    control: float  # reduced before the last group was reduced


def main(arguments: list[str]) -> None:
    num_runs = int(arguments[0]) if arguments else RUNS
    for number in range(num_runs):
        with tempfile.TemporaryDirectory() as directory:
            overlap = measure_overlap(Path(directory))
        print(
            f"run {number + 1}: the first group overlaps in {overlap.first_group:.0%} of the steps, "
            f"the control vector in {overlap.control:.0%}"
        )


def measure_overlap(directory: Path) -> Overlap:
    """Train two ranks, and read rank 0's timeline."""
    timeline = directory / "timeline.json"
    programs = Path(sys.executable).parent
    environment = clean_environment(os.environ, programs=programs) | {"HOROVOD_TIMELINE": str(timeline)}
    launcher = ["horovodrun", "-np", "2", sys.executable, "-m", "ringtrain"]
    settings = [*FLAGS, "--steps", str(STEPS), "--out", str(directory / "run")]
    subprocess.run(
        launcher + settings,
        env=environment,
        check=True,
        timeout=TIMEOUT_SECONDS,
        stdout=subprocess.DEVNULL,
    )
    return read_overlap(timeline.read_text())


def read_overlap(timeline: str) -> Overlap:
    """Return the shares of a timeline of Horovod.

    Raises:
        ValueError: it has a single group, or another number of steps than ``STEPS``.
    """
    negotiations, reductions = read_times(timeline)
    numbers = {int(name.split("/")[1].split("_")[0]) for name in negotiations if name.startswith("gradients/")}
    if len(numbers) < 2:
        raise ValueError("the gradients were summed in one group")
    first_group = f"gradients/{min(numbers)}"
    last_group = f"gradients/{max(numbers)}"
    first_reduced = last_times(reductions, first_group)
    last_ready = last_times(negotiations, last_group)
    last_reduced = last_times(reductions, last_group)
    control_reduced = last_times(reductions, "control")
    if len(first_reduced) != STEPS:
        raise ValueError(f"the timeline has {len(first_reduced)} steps, not {STEPS}")
    return Overlap(share_before(first_reduced, last_ready), share_before(control_reduced, last_reduced))


def share_before(times: list[float], later_times: list[float]) -> float:
    """Return the share of steps whose time is before the later one."""
    num_before = 0
    for time, later_time in zip(times, later_times, strict=True):
        num_before += time < later_time
    return num_before / len(times)


def read_times(timeline: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return by tensor when rank 0 had it ready, and when its reduction ended: microseconds by step."""
    text = timeline.rstrip().rstrip(",").rstrip("]")
    events: list[dict[str, Any]] = json.loads(f"{text}]")
    tensor_names = {}
    for event in events:
        if event.get("name") == "process_name" and "name" in event["args"]:
            tensor_names[event["pid"]] = event["args"]["name"]
    open_phases: dict[int, list[str]] = defaultdict(list)
    negotiations: dict[str, list[float]] = defaultdict(list)
    reductions: dict[str, list[float]] = defaultdict(list)
    for event in events:
        pid = event["pid"]
        if event["ph"] == "B":
            open_phases[pid].append(event["name"])
            if event["name"] == "NEGOTIATE_ALLREDUCE":
                negotiations[tensor_names[pid]].append(event["ts"])
        elif event["ph"] == "E":
            phase = open_phases[pid].pop()
            if phase == "ALLREDUCE":
                reductions[tensor_names[pid]].append(event["ts"])
    return negotiations, reductions


def last_times(times: dict[str, list[float]], group: str) -> list[float]:
    """Return for each step the latest time of the tensors of a group."""
    tensors = []
    for name, values in times.items():
        if name == group or name.startswith(f"{group}_"):
            tensors.append(values)
    return [max(step) for step in zip(*tensors, strict=True)]


if __name__ == "__main__":
    main(sys.argv[1:])
