"""The memory of each rank that trains WIDE (21.9 M parameters) with Adam, the optimizer shared out and not.

    python -m tests.bench.memory

One after the other 1, 2 and 4 ranks on this machine take some steps. The slots' bytes are counted; the peak is that of
the resident memory that is a rank's own, with its share of what several have (Linux' PSS), looked at every few
milliseconds. It writes results/memory.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.origin import describe_commit
from ringtrain.config import make_config
from ringtrain.runtime.devices import start_tensorflow
from ringtrain.runtime.world import read_world
from ringtrain.training.joining import pin
from tests.world.processes import clean_environment

SIZES = (1, 2, 4)
STEPS = 6
LOOK_SECONDS = 0.02
TIMEOUT_SECONDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of_rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sharded", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("results/memory.json"))
    arguments = parser.parse_args()
    if arguments.of_rank is not None:
        measure_rank(arguments.of_rank, is_sharded=arguments.sharded)
        return
    rows = [measure(size, is_sharded=sharded) for size in SIZES for sharded in (False, True) if size > 1 or not sharded]
    result = {"command": "python -m tests.bench.memory", **describe_commit(), "rows": rows}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(
            {
                name: value if isinstance(value, bool | int) else [round(v, 1) for v in value]
                for name, value in row.items()
            }
        )


def measure(size: int, *, is_sharded: bool) -> dict[str, Any]:
    """Each rank's slots and peak, in MiB."""
    with tempfile.TemporaryDirectory() as directory:
        rank = [
            sys.executable,
            "-m",
            "tests.bench.memory",
            "--of_rank",
            directory,
            *(["--sharded"] if is_sharded else []),
        ]
        launcher = ["mpirun", "-np", str(size), "--oversubscribe", "--bind-to", "none"]
        subprocess.run([*launcher, *rank], env=clean_environment(), check=True, timeout=TIMEOUT_SECONDS)
        ranks = [json.loads((Path(directory) / f"{number}.json").read_text()) for number in range(size)]
    return {
        "ranks": size,
        "sharded": is_sharded,
        **{name: [r[name] for r in ranks] for name in ("slots_mib", "peak_mib")},
    }


def measure_rank(directory: Path, *, is_sharded: bool) -> None:
    """Take some steps, and write what this rank's slots and its memory were."""
    world = read_world(os.environ)
    plan = pin(world)
    start_tensorflow(plan, world)

    from benchmarks.workloads import WIDE_ADAM
    from ringtrain.collectives import connect, with_native_sums
    from ringtrain.training.job import create_job

    config = make_config({"steps": STEPS, "shard_optimizer": is_sharded}, WIDE_ADAM.defaults)
    collective = with_native_sums(connect("auto", world))
    job = create_job(WIDE_ADAM(), config, collective, num_threads=1)
    job.step.share_values(collective)
    peak, has_ended = 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not has_ended.wait(LOOK_SECONDS):
            peak = max(peak, read_pss())

    thread = threading.Thread(target=look)
    thread.start()
    for batch in job.batches:
        job.step(batch, 1e-6).numpy()
    has_ended.set()
    thread.join()
    slots = sum(variable.numpy().nbytes for variable in job.step.optimizer.variables)
    values = {"slots_mib": slots / 2**20, "peak_mib": peak / 2**20}
    (directory / f"{world.rank}.json").write_text(json.dumps(values))
    collective.close()


def read_pss() -> int:
    """Bytes of this process's resident memory, of shared pages its part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
