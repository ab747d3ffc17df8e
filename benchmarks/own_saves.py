"""How long the training stands still for a save: a rank of ``benchmarks checkpoint``.

    horovodrun -np 2 python -m benchmarks.own_saves --model WIDE --how written --output DIR

``--how handed_over`` stops the clock when the training may resume, as in ringtrain; ``--how written`` when the
checkpoint is on the disk. The checkpoint is compared with the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from ringtrain.config import make_config
from ringtrain.runtime.devices import start_tensorflow
from ringtrain.runtime.world import read_world
from ringtrain.training.joining import pin

NUM_SAVES = 9
STEPS_BETWEEN = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--how", choices=("handed_over", "written"), required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    world = read_world(os.environ)
    plan = pin(world)
    start_tensorflow(plan, world)

    from benchmarks import workloads
    from ringtrain.collectives import connect
    from ringtrain.training.job import create_job

    workload_class = getattr(workloads, arguments.model)
    config = make_config({"steps": 10**6}, workload_class.defaults)
    collective = connect("auto", world)
    job = create_job(workload_class(), config, collective, num_threads=plan.intra_op_threads)
    job.step.share_values(collective)
    seconds, fault = time_saves(job, arguments.output, is_waited=arguments.how == "written")
    if world.is_rank0:
        result = {
            "figures": {"save": statistics.median(seconds)},
            "raw": {"seconds": seconds},
            "fault": fault,
            "checked": "the newest checkpoint, read back: it holds the weights bit for bit",
        }
        (arguments.output / "result.json").write_text(json.dumps(result))
    collective.close()


def time_saves(job: Any, directory: Path, *, is_waited: bool) -> tuple[list[float], str]:
    """Return seconds of each save on rank 0, and a fault."""
    from ringtrain.run.directory import RunDirectory
    from ringtrain.run.resume import Progress
    from ringtrain.run.store import find_newest
    from ringtrain.training.saving import CheckpointWriter, describe_run, take_snapshot

    batches = iter(job.batches)
    facts = describe_run(job.config, job.collective.world.size, None)
    writer = None
    if job.collective.world.is_rank0:
        writer = CheckpointWriter(RunDirectory(directory), keep=3, last_step=0)
    seconds: list[float] = []
    fault = ""
    for step in range(1, (NUM_SAVES + 1) * STEPS_BETWEEN + 1):  # one save more than is counted
        job.step(next(batches), job.plan.learning_rate(0)).numpy()  # waits for it
        if writer is None or step % STEPS_BETWEEN:
            continue
        start = time.perf_counter()
        writer.save(take_snapshot(job.step.named_variables, step, Progress(), facts), as_step=True, as_best=False)
        if is_waited:
            writer.wait()
        seconds.append(time.perf_counter() - start)
        writer.wait()
        newest, _ = find_newest(RunDirectory(directory).checkpoints)
        wanted = {name: variable.numpy() for name, variable in job.step.named_variables.items()}
        is_equal = newest is not None and all(np.array_equal(newest.variables[name], wanted[name]) for name in wanted)
        if newest is None or newest.step != step or not is_equal:
            fault = f"the checkpoint of step {step} is not what the model holds"
    return seconds[1:], fault


if __name__ == "__main__":
    main()
