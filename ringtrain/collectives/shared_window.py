"""Memory that all ranks of a node have mapped: the window through which they meet, and where their sums lie."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import secrets
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NAME = "ringtrain"  # of the memory, in /proc
CHUNK_BYTES = 1024 * 1024
SLOTS = 2  # chunks that are under way at the same time
TOKEN_BYTES = 16
NUM_LISTS = 6  # of a number for each rank, in a window
SQUARES_DTYPE = np.dtype(np.float64)
LINE_BYTES = 64  # of a core's cache; TensorFlow takes over arrays that begin at such an address without a copy
REFERENCES_OF_ONE_NAME = 2  # its own, and that of the question, in CPython 3.10 to 3.13
REFERENCES_WHILE_FREE = 3  # the list's, the loop's, and that of the question


class Window:
    """Memory of all ranks of a node. It belongs to no file, and is gone with the last process that has it."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Map the open memory of so many ranks."""
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)
        self._memory = mmap.mmap(descriptor, self.num_bytes(size))
        content = np.frombuffer(self._memory, np.uint8)
        self.token = content[:TOKEN_BYTES]
        places = content[LINE_BYTES : LINE_BYTES + NUM_LISTS * size * LINE_BYTES].view(np.int64)
        lists = places.reshape(NUM_LISTS, size, -1)[:, :, 0]  # each number has a line of its own
        # How many chunks each rank has given, added and taken so far; what it sums; which shared results of this sum
        # nothing of its process refers to, as bits; its process. A rank begins the next sum when all have added
        # their parts to this one, and have thus seen what it sums and what is free.
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
        processes = enumerate(self.processes.tolist())
        return next((rank for rank, process in processes if not os.path.exists(f"/proc/{process}")), None)


def share_window(rank: int, size: int, on_all: Callable[[Any], list[Any]]) -> Window | None:
    """A window that all ranks have mapped; None, on every rank, where some cannot. Every rank must call it.

    ``on_all`` gives everybody's JSON value to everybody, in the order of the ranks.
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
    """Map the memory that a process has open; OSError or ValueError where there is none."""
    if not str(path.readlink()).startswith(f"/memfd:{NAME}"):
        raise ValueError(f"{path} is something else")
    descriptor = os.open(path, os.O_RDWR)
    try:
        return Window(descriptor, size)
    finally:
        os.close(descriptor)


class Buffers:
    """Memory for results, used again once nobody has it: new memory costs more than what is done with it."""

    def __init__(self) -> None:
        self._memory: dict[int, list[Array]] = {}  # by bytes; every array that is made of one refers to it

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array of any content, which TensorFlow can take over without a copy."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        kept = self._memory.setdefault(num_bytes, [])
        free = next((memory for memory in kept if sys.getrefcount(memory) == REFERENCES_WHILE_FREE), None)
        if free is None:
            free = np.empty(num_bytes + LINE_BYTES, np.uint8)
            kept.append(free)
        begin = -free.ctypes.data % LINE_BYTES
        return free[begin : begin + num_bytes].view(dtype).reshape(shape)


class SharedResult:
    """Memory where all ranks add a sum, and read it: whoever has it writes to it in the sum alone."""

    def __init__(self, descriptor: int, begin: int, arrays: Sequence[Array]) -> None:
        """Map memory for sums of such arrays: it begins here, at a multiple of ``mmap.ALLOCATIONGRANULARITY``."""
        self._specs = []
        num_bytes = 0
        for array in arrays:
            self._specs.append((num_bytes, array.nbytes, array.dtype, array.shape))
            num_bytes += round_up(array.nbytes, LINE_BYTES)
        self.num_bytes = round_up(num_bytes, mmap.ALLOCATIONGRANULARITY)
        self._read: Array | None = None  # what TensorFlow has refers to it
        with contextlib.suppress(OSError):  # a limit of the process; then it is free for nobody
            os.posix_fallocate(descriptor, begin, self.num_bytes)
            to_write = mmap.mmap(descriptor, self.num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=begin)
            self._written = np.frombuffer(to_write, np.uint8)
            # What wrote here by mistake would change the other ranks' sums: it ends the process instead.
            to_read = mmap.mmap(
                descriptor, self.num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ, offset=begin
            )
            self._read = np.frombuffer(to_read, np.uint8)

    @property
    def is_free(self) -> bool:
        """Whether it is there, and nothing in this process refers to it."""
        return self._read is not None and sys.getrefcount(self._read) == REFERENCES_OF_ONE_NAME

    def to_write(self) -> list[Array]:
        return self._views(self._written)

    def to_read(self) -> list[Array]:
        """The same, which cannot be written to."""
        assert self._read is not None
        return self._views(self._read)

    def _views(self, memory: Array) -> list[Array]:
        return [memory[at : at + length].view(dtype).reshape(shape) for at, length, dtype, shape in self._specs]


def round_up(number: int, unit: int) -> int:
    """To a multiple of the unit."""
    return -(-number // unit) * unit
