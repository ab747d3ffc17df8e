"""Ordered sums of the ranks of a node, on cores, through memory that they share; all else Horovod carries.

Horovod's own thread looks once a cycle (``HOROVOD_CYCLE_TIME``) at what is ready on all ranks, so that a sum takes that
long at least, however short it is. That is how it finds an order for many sums that become ready in any order. Where a
step makes all its sums at one place, the ranks need no order: whoever comes there waits for the others, and for nothing
else. And memory that all can read saves the copies from one process to the other.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

import tensorflow as tf

from ringtrain.collectives.base import Totals, mark_collective
from ringtrain.collectives.horovod import HorovodCollective
from ringtrain.collectives.results import Array
from ringtrain.collectives.shared_sums import SharedSums
from ringtrain.collectives.shared_window import SQUARES_DTYPE, Window

DTYPES = ("float32", "float64")
OPERATION = "sum_in_shared_memory"  # what TensorFlow's graph calls it
TRACE = "sum in shared memory"  # what TensorFlow's profile calls it


class SharedMemory(HorovodCollective):
    """The collective of a run whose ranks are on the cores of one node."""

    def __init__(self, carrier: HorovodCollective, window: Window, *, overlaps_compute: bool) -> None:
        """Every rank has the same window.

        Args:
            carrier: carries what does not go through memory.
            overlaps_compute: whether the carrier's sums travel while this rank computes. Not so where a rank has one
                core, which they take as well: then large sums are best ordered, too.
        """
        super().__init__(carrier.world, carrier.hvd, carrier.threads)
        self.overlaps_compute = overlaps_compute
        what = "short sums" if overlaps_compute else "gradients"
        self.description += f", {what} through shared memory"
        self._sums = SharedSums(window, self.world.rank, self.world.size)

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, ordered: bool = False, read_only: bool = False
    ) -> Totals:
        if not ordered or any(tensor.dtype.name not in DTYPES for tensor in tensors):
            return super().all_reduce(tensors, name=name)
        specs = [(tuple(tensor.shape), tensor.dtype.name) for tensor in tensors]
        what = zlib.crc32(repr([name, read_only, *specs]).encode())
        dtypes = [*(tensor.dtype for tensor in tensors), SQUARES_DTYPE]
        add_up = functools.partial(self._add_up, what, read_only)
        *totals, squares = mark_collective(tf.numpy_function(add_up, tensors, dtypes, name=OPERATION), name)
        for tensor, total in zip(tensors, totals, strict=True):
            total.set_shape(tensor.shape)
        squares.set_shape([len(tensors)])
        return Totals(totals, squares, keep_alive=totals if read_only else ())

    def _add_up(self, what: int, read_only: bool, *arrays: Array) -> list[Array]:
        with tf.profiler.experimental.Trace(TRACE):
            return self._sums.add_up(what, read_only, *arrays)
