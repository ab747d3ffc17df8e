"""What reading real data costs: cifar10 on its files against made data, and images per second of each kind of source.

    python -m tests.bench.inputs --cifar10 DIR --image_folder DIR --records DIR --out tests/bench/results/inputs.json

Interleaves rounds of ``horovodrun -np 2 python -m ringtrain --workload cifar10`` (stock) on made data, on CIFAR-10's
files, and on made data again (A/A: how noisy the machine is). Then one process reads shuffled batches of 128 from each
source, as a rank does, without training. ``--records`` are what ``ringtrain convert`` makes of the image folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.cnn import ROOT, TIMEOUT_SECONDS, describe_origin, summarize

BATCH_SIZE = 128
SOURCES = {
    "image folder": ("image_folder", "none"),
    "TFRecord files": ("tfrecord", "none"),
    "TFRecord files, cached on the node": ("tfrecord", "node"),
}


def run_cifar10(data: list[str], steps: int, warm_up_steps: int) -> float:
    """Examples per second over both ranks, without the first ``warm_up_steps``."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        horovodrun = shutil.which("horovodrun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        flags = ["--workload", "cifar10", *data, "--steps", steps, "--log_every", warm_up_steps, "--out", out]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "OMPI_"))}
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        subprocess.run(
            [str(horovodrun), "-np", "2", sys.executable, "-m", "ringtrain", *map(str, flags)],
            check=True,
            cwd=ROOT,
            env=environment | allowed,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_SECONDS,
        )
        events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = [event for event in events if event["event"] == "train"][1:]
    return len(timed) / sum(1 / event["examples_per_sec"] for event in timed)


def read_images(kind: str, data_dir: Path, cache: Any, num_batches: int) -> float:
    """Images per second that one process reads, decodes and shuffles."""
    from ringtrain.collectives.solo import Solo
    from ringtrain.data.cache import with_cache
    from ringtrain.data.image_folder import load_image_folder
    from ringtrain.data.order import SampleOrder
    from ringtrain.data.pipeline import local_batches
    from ringtrain.data.tfrecord import load_tfrecords
    from ringtrain.world import read_world

    world = read_world({})
    load: dict[str, Any] = {"image_folder": load_image_folder, "tfrecord": load_tfrecords}
    train, _ = load[kind](data_dir, image_size=None, channels=3)
    source = with_cache(train, cache, Solo(world), name="train", num_threads=1)
    order = SampleOrder(num_samples=source.num_samples, global_batch_size=BATCH_SIZE)
    batches = iter(local_batches(source, order, world, first_step=0, end_step=num_batches + 5, num_threads=1))
    for _ in range(5):
        next(batches)
    start = time.perf_counter()
    num_images = sum(len(batch.indices) for batch in batches)
    return num_images / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("cifar10", "image_folder", "records", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--warm_up_steps", type=int, default=30, help="must divide steps")
    args = parser.parse_args()
    made, real = ["--synthetic", "true"], ["--data_dir", str(args.cifar10)]
    rounds: list[dict[str, float]] = []
    for number in range(args.rounds):
        runs = (("made", made), ("real", real), ("made_again", made))
        rounds.append({name: round(run_cifar10(data, args.steps, args.warm_up_steps), 1) for name, data in runs})
        print(f"round {number + 1}: {rounds[-1]}", flush=True)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    places = {"image_folder": args.image_folder, "tfrecord": args.records}
    readings = [
        {name: round(read_images(kind, places[kind], cache, 40)) for name, (kind, cache) in SOURCES.items()}
        for _ in range(args.rounds)
    ]
    result = describe(args, rounds, readings)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key not in ("rounds", "readings")}, indent=2))


def describe(
    args: argparse.Namespace, rounds: list[dict[str, float]], readings: list[dict[str, int]]
) -> dict[str, Any]:
    """What the result file holds."""
    data = "--cifar10 D --image_folder D --records D"
    flags = f"--rounds {args.rounds} --steps {args.steps} --warm_up_steps {args.warm_up_steps}"
    return {
        **describe_origin(f"python -m tests.bench.inputs {data} {flags} --out {args.out.name}"),
        "unit": "examples per second: 2 ranks of local batch 128 training; one core reading 32x32 images",
        "real over made data": summarize([2 * r["real"] / (r["made"] + r["made_again"]) for r in rounds]),
        "made over made again (A/A)": summarize([r["made"] / r["made_again"] for r in rounds]),
        "images read per second": {name: summarize([float(r[name]) for r in readings]) for name in SOURCES},
        "rounds": rounds,
        "readings": readings,
    }


if __name__ == "__main__":
    main()
