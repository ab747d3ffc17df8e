"""Where sums of ranks of one node lie: in memory of a rank's own, or in memory that all ranks read."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LINE_BYTES = 64  # of a core's cache; TensorFlow takes over arrays that begin at such an address without a copy
REFERENCES_OF_ONE_NAME = 2  # its own, and that of the question, in CPython 3.10 to 3.13
REFERENCES_WHILE_FREE = 3  # the list's, the loop's, and that of the question


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
