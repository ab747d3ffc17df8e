"""Ordered sums of the ranks of a node, on cores, through memory that they share; all else Horovod carries.

Horovod's own thread looks once a cycle (``HOROVOD_CYCLE_TIME``) at what is ready on all ranks, so that a sum takes that
long at least, however short it is. That is how it finds an order for many sums that become ready in any order. Where a
step makes all its sums at one place, the ranks need no order: whoever comes there waits for the others, and for nothing
else. And memory that all can read saves the copies from one process to the other.

What is to be added is cut into chunks that stay in a core's cache, and each chunk into a segment for each rank: rank r
adds everybody's segment r, and everybody takes its sum (a reduce-scatter and an all-gather, as in a ring, where every
neighbour is as near). So each sum is made once, in the order of the ranks, and all have the same bits. A sum that is
made again and again is not even taken: the ranks add it where all of them read it.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.collectives.base import Totals, mark_collective
from ringtrain.collectives.horovod import HorovodCollective
from ringtrain.collectives.shared_window import (
    CHUNK_BYTES,
    SLOTS,
    SQUARES_DTYPE,
    Array,
    Buffers,
    SharedResult,
    Window,
    round_up,
)
from ringtrain.errors import LOST_RANK_SIGN

DTYPES = ("float32", "float64")
OPERATION = "sum_in_shared_memory"  # what TensorFlow's graph calls it
TRACE = "sum in shared memory"  # what TensorFlow's profile calls it
ROW = 2048  # values
MAX_RESULTS = 3  # of one sum: TensorFlow may still have the last one, or the one before, when the next is made
LOOK_SECONDS = 1.0  # between two looks whether the processes of the other ranks are there
# After this long a thread of Python that computes all the time, such as one that feeds samples, hands over the
# interpreter, which a sum needs for each of its chunks. Python's own interval is as long as some whole steps.
SWITCH_SECONDS = 500e-6
# A rank that waits looks again at once for so long, and then sleeps in between: others may need its core. It is longer
# than another rank takes for a chunk, since even the shortest sleep would often end later than that.
SECONDS_AWAKE = 500e-6
FIRST_PAUSE_SECONDS = 10e-6
LONGEST_PAUSE_SECONDS = 500e-6
PAUSE_GROWTH = 1.2


class SharedMemory(HorovodCollective):
    """The collective of a run whose ranks are on the cores of one node."""

    def __init__(self, carrier: HorovodCollective, window: Window, *, overlaps_compute: bool) -> None:
        """Every rank has the same window; ``carrier`` carries what does not go through it.

        Where a rank has one core, the carrier's sums do not overlap compute, since they take it as well: then large
        sums are best ordered, too.
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


class SharedSums:
    """Adds tensors over all ranks, in one call at a time."""

    def __init__(self, window: Window, rank: int, size: int) -> None:
        """Every rank has the same window."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._window, self._rank, self._size = window, rank, size
        self._num_chunks = 0  # that were added in all calls so far
        self._buffers = Buffers()
        self._results: dict[tuple[Any, ...], list[SharedResult]] = {}  # by what is summed, shapes and types
        self._end = round_up(Window.num_bytes(size), mmap.ALLOCATIONGRANULARITY)  # of the memory that is in use

    def add_up(self, what: int, read_only: bool, *arrays: Array) -> list[Array]:
        """The sum of each array over all ranks, and ``[len(arrays)]``, the sum of squares of each of these.

        ``what`` is a number that says what is summed, the same on all ranks; ``read_only``: the sums may lie in memory
        that the other ranks read. The arrays are of one dimension at least.
        """
        key = (what, *((array.shape, array.dtype.str) for array in arrays))
        results = self._results.get(key, []) if read_only else []
        # What is not finite shows in the sum, as it does in TensorFlow, and needs no warning.
        with np.errstate(all="ignore"):
            first = next((chunk for array in arrays for chunk in cut(array)), None)
            free_on_all = 0 if first is None else self._begin(what, results, first)
            shared = results[free_on_all.bit_length() - 1] if free_on_all else None
            totals = shared.to_write() if shared else [self._buffers.take(a.shape, a.dtype) for a in arrays]
            if read_only and first is not None and shared is None:
                self._prepare_result(key, arrays)
            of_arrays = [list(zip(cut(a), cut(total), strict=True)) for a, total in zip(arrays, totals, strict=True)]
            chunks = [pair for of_array in of_arrays for pair in of_array]
            of_chunks = iter(self._add_chunks(chunks, is_shared=shared is not None))
        squares = [sum(itertools.islice(of_chunks, len(of_array))) for of_array in of_arrays]
        return [*(shared.to_read() if shared else totals), np.array(squares, SQUARES_DTYPE)]

    def _begin(self, what: int, results: Sequence[SharedResult], first: Array) -> int:
        """Give the first chunk, and see what all ranks are about to do; which results are free on all, as bits."""
        window = self._window
        # Seen by the others with the first chunk.
        window.summed[self._rank] = what
        window.free_buffers[self._rank] = sum(result.is_free << number for number, result in enumerate(results))
        self._give(self._num_chunks, first)
        self._wait_until(lambda: window.given.min() > self._num_chunks)
        if (window.summed != what).any():
            raise RuntimeError("the ranks are at different places of the program: they sum different things.")
        return int(np.bitwise_and.reduce(window.free_buffers))

    def _prepare_result(self, key: tuple[Any, ...], arrays: Sequence[Array]) -> None:
        """Have memory of all for the next time that this is summed, from its second time on.

        All ranks do so in the same sum, and whatever becomes of it in one of them, so that all have it at one place.
        """
        results = self._results.get(key)
        if results is None:
            self._results[key] = []
        elif len(results) < MAX_RESULTS:
            results.append(SharedResult(self._window.descriptor, self._end, arrays))
            self._end += results[-1].num_bytes
            self._buffers = Buffers()  # as much as the sum has, which it needs no more

    def _add_chunks(self, chunks: Sequence[tuple[Array, Array]], *, is_shared: bool) -> list[float]:
        """Give, add and take each chunk: while the others give one, this rank adds the one before.

        Each of this rank's chunks comes with where its sum goes; the first is given. ``is_shared``: all ranks read the
        sums there. Returns the sum of squares of each chunk's sum.
        """
        first, self._num_chunks = self._num_chunks, self._num_chunks + len(chunks)
        squares = []
        for number in range(len(chunks) + 2):
            if 0 < number < len(chunks):  # the first was given with what this rank is about to do
                self._give(first + number, chunks[number][0])
            if 0 <= number - 1 < len(chunks):
                self._add(first + number - 1, *chunks[number - 1], is_shared=is_shared)
            if 0 <= number - 2 < len(chunks):
                squares.append(self._take(first + number - 2, chunks[number - 2][1], is_shared=is_shared))
        return squares

    def _give(self, number: int, mine: Array) -> None:
        """Let the others read their segments of a chunk."""
        window = self._window
        self._wait_until(lambda: window.added.min() > number - SLOTS)
        contribution = view_as(window.contributions[self._rank, number % SLOTS], mine)
        begin, end = self._segment(mine.size, self._rank)
        contribution[:begin], contribution[end:] = mine[:begin], mine[end:]
        window.given[self._rank] = number + 1

    def _add(self, number: int, mine: Array, total: Array, *, is_shared: bool) -> None:
        """Add everybody's segment of this rank."""
        window = self._window
        self._wait_until(lambda: window.given.min() > number and window.taken.min() > number - SLOTS)
        begin, end = self._segment(mine.size, self._rank)
        parts = [
            mine[begin:end]
            if rank == self._rank
            else view_as(window.contributions[rank, number % SLOTS], mine)[begin:end]
            for rank in range(self._size)
        ]
        ours = total[begin:end]
        np.add(parts[0], parts[1], out=ours)
        for part in parts[2:]:
            np.add(ours, part, out=ours)
        if not is_shared:
            view_as(window.sums[number % SLOTS], mine)[begin:end] = ours
        window.squares[number % SLOTS, self._rank] = sum_of_squares(ours)  # while the core's cache has it
        window.added[self._rank] = number + 1

    def _take(self, number: int, total: Array, *, is_shared: bool) -> float:
        """Take the sums of the other segments, and the squares of all."""
        window = self._window
        self._wait_until(lambda: window.added.min() > number)
        if not is_shared:
            sums = view_as(window.sums[number % SLOTS], total)
            begin, end = self._segment(total.size, self._rank)
            total[:begin], total[end:] = sums[:begin], sums[end:]
        squares = float(window.squares[number % SLOTS].sum())
        window.taken[self._rank] = number + 1
        return squares

    def _wait_until(self, is_so: Callable[[], Any]) -> None:
        """Wait for the other ranks. Whether they move is the watchdog's to see; here, whether they are there."""
        if is_so():
            return
        begin = last_look = time.perf_counter()
        pause = FIRST_PAUSE_SECONDS
        while not is_so():
            now = time.perf_counter()
            if now - last_look > LOOK_SECONDS:
                last_look, lost = now, self._window.find_lost()
                if lost is not None and not is_so():
                    raise RuntimeError(f"{LOST_RANK_SIGN}: rank {lost}")
            if now - begin > SECONDS_AWAKE:
                time.sleep(pause)
                pause = min(PAUSE_GROWTH * pause, LONGEST_PAUSE_SECONDS)

    def _segment(self, length: int, rank: int) -> tuple[int, int]:
        return length * rank // self._size, length * (rank + 1) // self._size


def cut(array: Array) -> Iterator[Array]:
    """Chunks of an array."""
    flat = array.reshape(-1)
    length = CHUNK_BYTES // array.itemsize
    for start in range(0, flat.size, length):
        yield flat[start : start + length]


def view_as(slot: Array, chunk: Array) -> Array:
    """A slot as an array like a chunk."""
    return slot[: chunk.nbytes].view(chunk.dtype)


def sum_of_squares(values: Array) -> float:
    """Of a vector: of rows first, since float32 would lose digits in a sum of them all."""
    num_in_rows = values.size - values.size % ROW
    rows, rest = values[:num_in_rows].reshape(-1, ROW), values[num_in_rows:]
    return float((rows[:, np.newaxis] @ rows[:, :, np.newaxis]).sum(dtype=np.float64)) + float(rest @ rest)
