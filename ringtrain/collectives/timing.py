"""Time of an all-reduce, with a check of its sum."""

from __future__ import annotations

import statistics
import time

from ringtrain.collectives.base import Collective
from ringtrain.collectives.groups import ONE_MESSAGE_BYTES
from ringtrain.runtime import activity

VALUE_BYTES = 4  # float32


def time_all_reduce(collective: Collective, num_bytes: int, *, calls: int = 5, warm_up: int = 1) -> tuple[float, int]:
    """Time float32 sums in a compiled function. Collective.

    Returns the median seconds of ``calls`` after ``warm_up``, and this rank's number of wrong values.
    """
    import tensorflow as tf

    rank, size = collective.world.rank, collective.world.size
    tensor = tf.fill([num_bytes // VALUE_BYTES], float(rank + 1))
    is_ordered = num_bytes <= ONE_MESSAGE_BYTES or not collective.overlaps_compute

    @tf.function(jit_compile=False)
    def add() -> tf.Tensor:
        name = f"timing/{num_bytes}"
        if is_ordered:
            return collective.sum_in_order([tensor], name=name).tensors[0]
        return collective.all_reduce([tensor], name=name)[0]

    seconds, wrong = [], 0
    for _ in range(warm_up + calls):
        start = time.perf_counter()
        total = add()
        float(total[0])  # waits for the GPU
        seconds.append(time.perf_counter() - start)
        wrong += int(tf.math.count_nonzero(total != size * (size + 1) / 2))
        activity.move()  # for the watchdog
    return statistics.median(seconds[warm_up:]), wrong


def bus_bandwidth(payload_bytes: int, seconds: float, size: int) -> float:
    """Return bytes per second per link of a ring (nccl-tests, doc/PERFORMANCE.md)."""
    return payload_bytes / seconds * 2 * (size - 1) / size
