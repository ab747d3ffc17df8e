"""What a save costs the training: every 100 steps against none, and the wait against a save that is waited for.

    mpirun -np 2 python -m tests.bench.checkpoint --rounds 15 --out tests/bench/results/checkpoint.json

Each round trains the tutorial CNN with Adam for 100 steps without a save, 100 steps with one in their middle, and 100
without one again (A/A: how noisy the machine is). The waits are those of rank 0, on that model and on an MLP of 22 M
parameters. What was written is read back and held against the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ringtrain.config import Config, OptimizerConfig
from ringtrain.devices import apply_plan, claim_cores, plan_devices, read_machine, start_tensorflow
from ringtrain.world import read_world

SAVE_EVERY_STEPS = 100
LOCAL_BATCH_SIZE = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    world = read_world(os.environ)
    plan = plan_devices(world, read_machine(os.environ), os.environ, deterministic=False, claim_cores=claim_cores)
    apply_plan(plan)
    start_tensorflow(plan, world)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as directory:
        result = measure(args.rounds, Path(directory), plan.intra_op_threads)
    if world.is_first:
        linux = platform.release().split("-")[0]
        machine = f"{len(os.sched_getaffinity(0)) * world.size} cores, {platform.machine()}, Linux {linux}"
        command = (
            f"mpirun -np {world.size} python -m tests.bench.checkpoint --rounds {args.rounds} --out {args.out.name}"
        )
        result = {"command": command, "machine": machine, **result}
        args.out.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=2))


def measure(rounds: int, directory: Path, num_threads: int) -> dict[str, Any]:
    from ringtrain.collectives import connect
    from tests.bench.models import Wide
    from tests.bench.tutorial_cnn import TutorialCNN

    collective = connect("auto", read_world(os.environ))
    cnn = Saver(TutorialCNN(), collective, directory / "cnn", num_threads)
    cnn.train(20, saves=False)
    timed = []
    for _ in range(rounds):
        timed.append(
            {name: cnn.train(SAVE_EVERY_STEPS, saves=name == "saving") for name in ("none", "saving", "again")}
        )
    cost = [2 * each["saving"] / (each["none"] + each["again"]) - 1 for each in timed]
    control = [each["none"] / each["again"] - 1 for each in timed]
    wide = Saver(Wide(), collective, directory / "wide", num_threads)
    waits = {"tutorial CNN": cnn.compare_waits(rounds), "MLP of 22 M parameters": wide.compare_waits(rounds)}
    collective.close()
    return {
        f"time lost by a save every {SAVE_EVERY_STEPS} steps, share": describe(cost),
        "without a save twice (A/A), share": describe(control),
        "milliseconds per step": 1000 * statistics.median(each["none"] for each in timed) / SAVE_EVERY_STEPS,
        "wait of the training over a synchronous save": waits,
        "rounds": timed,
    }


class Saver:
    """A job that can be saved."""

    def __init__(self, workload: Any, collective: Any, directory: Path, num_threads: int) -> None:
        from ringtrain.console import Console
        from ringtrain.job import create_job
        from ringtrain.run_directory import RunDirectory
        from ringtrain.saving import CheckpointWriter, describe_run
        from ringtrain.variables import share_first_values

        config = Config(
            workload="bench",
            steps=10**6,
            batch_size=LOCAL_BATCH_SIZE,
            optimizer=OptimizerConfig(name="adam", lr=1e-4),
        )
        self.job = create_job(workload, config, collective, num_threads=num_threads)
        share_first_values(self.job.step.variables, collective)
        self.batches = iter(self.job.batches)
        self.facts = describe_run(self.job)
        self.step = 0
        self.writer = None
        if collective.world.is_first:
            directory.mkdir()
            console = Console(sys.stderr, is_terminal=False)
            self.writer = CheckpointWriter(RunDirectory(directory), keep=3, say=console.line, last_step=0)

    def train(self, steps: int, *, saves: bool) -> float:
        """Seconds for some steps, with or without a save in their middle; all ranks begin and end together."""
        start = time.perf_counter()
        for number in range(steps):
            returned = self.job.step(next(self.batches), 1e-4)
            self.job.step.is_updated(returned)
            self.step += 1
            if saves and number == steps // 2:
                self.save()
        return time.perf_counter() - start

    def save(self) -> None:
        from ringtrain.progress import Progress
        from ringtrain.saving import take_snapshot

        if self.writer is not None:
            snapshot = take_snapshot(self.job, self.step, Progress(), self.facts)
            self.writer.save(snapshot, as_step=True, as_best=False)

    def compare_waits(self, rounds: int) -> dict[str, Any]:
        """On rank 0: how long the training waits for a save, over how long the save takes."""
        waits, saves = [], []
        for _ in range(rounds):
            self.train(2, saves=False)
            start = time.perf_counter()
            self.save()
            waits.append(time.perf_counter() - start)
            if self.writer is not None:
                self.writer.wait()
            self.train(2, saves=False)
            start = time.perf_counter()
            self.save()
            if self.writer is not None:
                self.writer.wait()
            saves.append(time.perf_counter() - start)
            self.check()
        return {
            "wait, milliseconds": describe([1000 * wait for wait in waits]),
            "synchronous, milliseconds": describe([1000 * save for save in saves]),
            "ratio": describe([wait / save for wait, save in zip(waits, saves, strict=True)]),
        }

    def check(self) -> None:
        """What lies on the disk is what the model holds."""
        from ringtrain.checkpoint import find_newest

        if self.writer is not None:
            newest, _ = find_newest(self.writer.root)
            assert newest is not None
            for name, variable in self.job.step.named_variables.items():
                np.testing.assert_array_equal(newest.variables[name], variable.value.numpy(), err_msg=name)


def describe(values: list[float]) -> dict[str, float]:
    """Median, and the middle half."""
    low, median, high = statistics.quantiles(values, n=4)
    return {name: round(value, 5) for name, value in (("median", median), ("from", low), ("to", high))}


if __name__ == "__main__":
    main()
