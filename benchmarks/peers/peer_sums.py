"""What the all-reduce scripts of the peers share: the sizes, the data, the timing, and the file of results.

The values are integers, so that sums must be exact.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NUM_VALUES = 1000  # distinct values; sums over all ranks are far below 2^24
WARM_UP_CALLS = 5
MIN_CALLS, MAX_CALLS = 12, 200
TIMED_BYTES = 512 * 2**20  # of all calls of a size, within the limits of their number


def parse_arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sizes", required=True, help="bytes of the arrays, such as 4096,65536")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    ways = ["function", "copied", "eager", "mpi", "nothing"]
    parser.add_argument("--how", default="function", choices=ways, help="function: compiled by TensorFlow")
    parser.add_argument("--cores", action="append", default=[], help="a rank's cores, such as 0,1; once for each rank")
    parser.add_argument("--intra_op_threads", type=int, default=0, help="0: TensorFlow's own number")
    parser.add_argument("--inter_op_threads", type=int, default=0, help="0: TensorFlow's own number")
    return parser.parse_args()


def time_sums(
    arguments: argparse.Namespace,
    rank: int,
    num_ranks: int,
    prepare: Callable[[np.ndarray], tuple[Callable[[], Any], Callable[[Any], Any]]],
    *,
    adds: bool = True,
) -> None:
    """Sum arrays of each size over all ranks; rank 0 writes the median seconds of each size, and faults.

    Args:
        prepare: (this rank's array) -> (sum function, conversion of its result to NumPy).
        adds: False: no sum, each rank keeps its array.
    """
    seconds, fault = {}, ""
    for text in arguments.sizes.split(","):
        values = np.arange(int(text) // 4, dtype=np.float32) % NUM_VALUES
        reduce, to_array = prepare(values + rank)
        num_calls = min(MAX_CALLS, max(MIN_CALLS, TIMED_BYTES // int(text)))
        for _ in range(WARM_UP_CALLS):
            reduce()
        times = []
        for _ in range(num_calls):
            start = time.perf_counter()
            outcome = reduce()
            times.append(time.perf_counter() - start)
        expected = num_ranks * values + num_ranks * (num_ranks - 1) // 2 if adds else values + rank
        if not np.array_equal(to_array(outcome), expected):
            fault = fault or f"the sum of {text} bytes is wrong"
        seconds[text] = statistics.median(times)
    if rank == 0:
        arguments.output.mkdir(parents=True, exist_ok=True)
        result = {"figures": seconds, "fault": fault, "checked": "sums of whole numbers, which are exact"}
        (arguments.output / "result.json").write_text(json.dumps(result))
