"""The time of an all-reduce, and a check of its sum."""

from __future__ import annotations

import statistics
import time

from ringtrain.collectives.base import Collective
from ringtrain.runtime import activity

VALUE_BYTES = 4  # float32


def time_all_reduce(collective: Collective, num_bytes: int, *, calls: int = 5, warm_up: int = 1) -> tuple[float, int]:
    """Sum float32 values over all ranks by a compiled function, as training does. Every rank must call it.

    Returns the median seconds of ``calls`` after ``warm_up``, and how many values of all sums are wrong on this rank.
    """
    import tensorflow as tf

    from ringtrain.collectives.gradients import ONE_MESSAGE_BYTES

    rank, size = collective.world.rank, collective.world.size
    tensor = tf.fill([num_bytes // VALUE_BYTES], float(rank + 1))
    is_ordered = num_bytes <= ONE_MESSAGE_BYTES or not collective.overlaps_compute

    @tf.function(jit_compile=False)
    def add() -> tf.Tensor:
        [total] = collective.all_reduce([tensor], name=f"timing/{num_bytes}", ordered=is_ordered).tensors
        return total

    seconds, wrong = [], 0
    for _ in range(warm_up + calls):
        start = time.perf_counter()
        total = add()
        float(total[0])  # a GPU's work has ended once its result is here
        seconds.append(time.perf_counter() - start)
        wrong += int(tf.math.count_nonzero(total != size * (size + 1) / 2))
        activity.move()  # the watchdog sees progress
    return statistics.median(seconds[warm_up:]), wrong


def bus_bandwidth(payload_bytes: int, seconds: float, size: int) -> float:
    """Bytes per second over each link of a ring, independent of the number of ranks: nccl-tests, doc/PERFORMANCE.md."""
    return payload_bytes / seconds * 2 * (size - 1) / size
