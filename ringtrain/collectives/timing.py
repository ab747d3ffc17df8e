"""Time of an all-reduce, with a check of its sum."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

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


class RingFit(NamedTuple):
    """The latency and rate of a link by which a ring takes the measured times."""

    gbit: float  # per second in each direction
    latency_us: float  # of a message


def fit_ring(times: Sequence[tuple[int, float]], size: int) -> RingFit | None:
    """Fit a ring of ``size`` ranks to measured (bytes, seconds) by relative least squares.

    Return None if no latency and rate above 0 fit.
    """
    import numpy as np  # so that help needs none

    num_messages = 2 * (size - 1)
    design = []
    for num_bytes, seconds in times:
        sent_bytes = num_messages / size * num_bytes
        design.append([num_messages / seconds, sent_bytes / seconds])
    solution = np.linalg.lstsq(np.array(design), np.ones(len(design)), rcond=None)[0]
    latency_sec, sec_per_byte = (float(value) for value in solution)
    if latency_sec <= 0 or sec_per_byte <= 0:
        return None
    return RingFit(gbit=8e-9 / sec_per_byte, latency_us=1e6 * latency_sec)
