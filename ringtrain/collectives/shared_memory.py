"""Sums of the ranks of one node, on cores, through memory that they share.

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

import contextlib
import functools
import itertools
import mmap
import os
import platform
import secrets
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringtrain.collectives.base import Totals
from ringtrain.collectives.results import LINE_BYTES, Array, Buffers, SharedResult, round_up
from ringtrain.errors import LOST_RANK_SIGN

if TYPE_CHECKING:
    import tensorflow as tf

NAME = "ringtrain"  # of the memory, in /proc
DTYPES = ("float32", "float64")
OPERATION = "sum_in_shared_memory"  # what TensorFlow's graph calls it
TRACE = "sum in shared memory"  # what TensorFlow's profile calls it
CHUNK_BYTES = 1024 * 1024
SLOTS = 2  # chunks that are under way at the same time
TOKEN_BYTES = 16
NUM_LISTS = 6  # of a number for each rank, in a window
ROW = 2048  # values
SQUARES_DTYPE = np.dtype(np.float64)
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


class Window:
    """Memory of all ranks of a node. It belongs to no file, and is gone with the last process that has it."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Map it.

        Args:
            descriptor: of the open memory.
            size: number of ranks.
        """
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)
        self._memory = mmap.mmap(descriptor, self.num_bytes(size))
        content = np.frombuffer(self._memory, np.uint8)
        self.token = content[:TOKEN_BYTES]
        places = content[LINE_BYTES : LINE_BYTES + NUM_LISTS * size * LINE_BYTES].view(np.int64)
        lists = places.reshape(NUM_LISTS, size, -1)[:, :, 0]  # each number has a line of its own
        # How many chunks each rank has given, added and taken so far; what it sums; which shared results of this sum
        # nothing of its process refers to, as bits; its process. A rank begins the next sum when all have added
        # their parts to this one, and have thus seen what it sums and offers.
        self.given, self.added, self.taken, self.summed, self.free_buffers, self.processes = lists
        rest = content[LINE_BYTES + NUM_LISTS * size * LINE_BYTES :]
        # Of each chunk under way, what each rank found as the sum of squares of its segment; a line for each.
        squares, chunks = rest[: SLOTS * size * LINE_BYTES], rest[SLOTS * size * LINE_BYTES :]
        self.squares = squares.view(SQUARES_DTYPE).reshape(SLOTS, size, -1)[:, :, 0]
        chunks = chunks.reshape(size + 1, SLOTS, CHUNK_BYTES)
        self.contributions, self.sums = chunks[:size], chunks[size]

    @staticmethod
    def num_bytes(size: int) -> int:
        """Of the window of so many ranks."""
        return LINE_BYTES + (NUM_LISTS + SLOTS) * size * LINE_BYTES + (size + 1) * SLOTS * CHUNK_BYTES

    def find_lost(self) -> int | None:
        """A rank whose process has ended; None where there is none."""
        return next((rank for rank, process in enumerate(self.processes.tolist()) if not is_alive(process)), None)


class SharedSums:
    """Adds tensors over all ranks, in one call at a time."""

    def __init__(self, window: Window, rank: int, size: int, *, carries_all: bool) -> None:
        """Every rank has the same window.

        Args:
            carries_all: whether it is better than Horovod at sums of any size, too: where a rank has one core, nothing
                is computed while gradients travel, since that takes the core as well.
        """
        self.carries_all = carries_all
        sys.setswitchinterval(SWITCH_SECONDS)
        self._window, self._rank, self._size = window, rank, size
        self._num_chunks = 0  # that were added in all calls so far
        self._buffers = Buffers()
        self._results: dict[tuple[Any, ...], list[SharedResult]] = {}  # by what is summed, shapes and types
        self._end = round_up(Window.num_bytes(size), mmap.ALLOCATIONGRANULARITY)  # of the memory that is in use

    def __call__(self, tensors: Sequence[tf.Tensor], name: str, *, may_share: bool) -> Totals:
        """Of tensors of ``DTYPES`` and of one dimension at least; in graphs and eagerly.

        Args:
            may_share: as in ``Collective.sum_alone``.
        """
        import tensorflow as tf

        specs = [(tuple(tensor.shape), tensor.dtype.name) for tensor in tensors]
        what = zlib.crc32(repr([name, may_share, *specs]).encode())
        dtypes = [*(tensor.dtype for tensor in tensors), SQUARES_DTYPE]
        add_up = functools.partial(self.add_up, what, may_share)
        *totals, squares = tf.numpy_function(add_up, tensors, dtypes, name=OPERATION)
        for tensor, total in zip(tensors, totals, strict=True):
            total.set_shape(tensor.shape)
        squares.set_shape([len(tensors)])
        return Totals(totals, squares)

    def add_up(self, what: int, may_share: bool, *arrays: Array) -> list[Array]:
        """The same of arrays.

        Args:
            what: a number that says what is summed.
            may_share: as above.

        Returns:
            The sum of each, and ``[len(arrays)]``, the sum of squares of each of these.

        Raises:
            RuntimeError: another rank sums something else, or has ended.
        """
        import tensorflow as tf

        key = (what, *((array.shape, array.dtype.str) for array in arrays))
        results = self._results.get(key, []) if may_share else []
        # What is not finite shows in the sum, as it does in TensorFlow, and needs no warning.
        with tf.profiler.experimental.Trace(TRACE), np.errstate(all="ignore"):
            first = next((chunk for array in arrays for chunk in cut(array)), None)
            free_on_all = 0 if first is None else self._begin(what, results, first)
            shared = results[lowest_bit(free_on_all)] if free_on_all else None
            totals = shared.to_write() if shared else [self._buffers.take(a.shape, a.dtype) for a in arrays]
            if may_share and first is not None and shared is None:
                self._prepare_result(key, arrays)
            of_arrays = [list(zip(cut(a), cut(total), strict=True)) for a, total in zip(arrays, totals, strict=True)]
            chunks = [pair for of_array in of_arrays for pair in of_array]
            of_chunks = iter(self._add_chunks(chunks, is_shared=shared is not None))
        squares = [sum(itertools.islice(of_chunks, len(of_array))) for of_array in of_arrays]
        return [*(shared.to_read() if shared else totals), np.array(squares, SQUARES_DTYPE)]

    def _begin(self, what: int, results: Sequence[SharedResult], first: Array) -> int:
        """Give the first chunk, and see what all ranks are about to do.

        Returns:
            Which of the results are free on all ranks, as bits.

        Raises:
            RuntimeError: another rank sums something else, or has ended.
        """
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

        Args:
            chunks: of this rank, each with where its sum goes. The first has been given.
            is_shared: whether the sums are added where all ranks read them.

        Returns:
            The sum of squares of each chunk's sum.
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


def lowest_bit(number: int) -> int:
    """The place of the lowest bit that is set."""
    return (number & -number).bit_length() - 1


def view_as(slot: Array, chunk: Array) -> Array:
    """A slot as an array like a chunk."""
    return slot[: chunk.nbytes].view(chunk.dtype)


def sum_of_squares(values: Array) -> float:
    """Of a vector: of rows first, since float32 would lose digits in a sum of them all."""
    num_in_rows = values.size - values.size % ROW
    rows, rest = values[:num_in_rows].reshape(-1, ROW), values[num_in_rows:]
    return float((rows[:, np.newaxis] @ rows[:, :, np.newaxis]).sum(dtype=np.float64)) + float(rest @ rest)


def is_alive(process: int) -> bool:
    """Whether a process of this node is there."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there, and another user's
        pass
    return True


def share_window(rank: int, size: int, on_all: Callable[[Any], list[Any]]) -> Window | None:
    """A window that all ranks have mapped; None, on every rank, where some cannot. Every rank must call it.

    Args:
        on_all: gives everybody's JSON value to everybody, in the order of the ranks.
    """
    place: list[Any] | None = None
    window, descriptor = None, -1
    # What one core writes first another must not see later than what it writes after that: x86 holds this by itself.
    if rank == 0 and platform.machine() == "x86_64":
        with contextlib.suppress(OSError):  # a limit of the process, or of its container
            descriptor = os.memfd_create(NAME)
            os.ftruncate(descriptor, Window.num_bytes(size))
            place = [os.getpid(), descriptor, secrets.token_hex(TOKEN_BYTES)]
    [place, *_] = on_all(place)
    if place is None:
        if descriptor >= 0:
            os.close(descriptor)
        return None
    pid, number, token = place
    with contextlib.suppress(OSError, ValueError):  # what has this number may be another container's process
        window = open_window(Path(f"/proc/{pid}/fd/{number}"), size)
    if rank == 0 and window is not None:
        window.token[:] = np.frombuffer(bytes.fromhex(token), np.uint8)
    on_all(None)  # the token is written
    has_it = window is not None and window.token.tobytes().hex() == token
    if window is not None and has_it:
        window.processes[rank] = os.getpid()
    all_have_it = all(on_all(has_it))
    if rank == 0:
        os.close(descriptor)  # all have opened it that ever will
    return window if all_have_it else None


def open_window(path: Path, size: int) -> Window:
    """Map the memory that a process has open.

    Raises:
        OSError, ValueError: there is none.
    """
    if not str(path.readlink()).startswith(f"/memfd:{NAME}"):
        raise ValueError(f"{path} is something else")
    descriptor = os.open(path, os.O_RDWR)
    try:
        return Window(descriptor, size)
    finally:
        os.close(descriptor)
