"""How fast one process reads images as a rank does, shuffled and in batches: for ``benchmarks input``.

python -m benchmarks.own_reading --kind image_folder --data_dir DIR --output DIR
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

BATCH_SIZE = 128
WARM_UP_BATCHES, TIMED_BATCHES = 5, 60
KINDS = ("image_folder", "tfrecord")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--data_dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    seconds, fault = time_reading(arguments.kind, arguments.data_dir)
    result = {
        "figures": {"image": seconds},
        "fault": fault,
        "checked": "each batch has the numbers that were planned, and as many images and labels",
    }
    (arguments.output / "result.json").write_text(json.dumps(result))


def time_reading(kind: str, data_dir: Path) -> tuple[float, str]:
    """Return seconds per image on one core, and a fault."""
    from ringtrain.data.formats.image_folder import load_image_folder
    from ringtrain.data.formats.tfrecord import load_tfrecords
    from ringtrain.data.order import SampleOrder
    from ringtrain.data.pipeline import local_batches
    from ringtrain.runtime.world import read_world

    world = read_world({})
    load: Any = load_image_folder if kind == "image_folder" else load_tfrecords
    source, _ = load(data_dir, image_size=None, channels=3)
    order = SampleOrder(num_samples=source.num_samples, global_batch_size=BATCH_SIZE)
    end = WARM_UP_BATCHES + TIMED_BATCHES
    batches = iter(local_batches(source, order, world, first_step=0, end_step=end, num_threads=1))
    for _ in range(WARM_UP_BATCHES):
        next(batches)
    start = time.perf_counter()
    read = list(batches)
    seconds = time.perf_counter() - start
    planned = [order.local_batch(step, rank=0, size=1).indices for step in range(WARM_UP_BATCHES, end)]
    is_right = all(
        batch.indices.numpy().tolist() == numbers.tolist() and len(batch.x) == len(batch.y) == len(numbers)
        for batch, numbers in zip(read, planned, strict=True)
    )
    return seconds / sum(map(len, planned)), "" if is_right else "a batch has not the numbers that were planned"


if __name__ == "__main__":
    main()
