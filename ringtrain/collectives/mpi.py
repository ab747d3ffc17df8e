"""Collectives by mpi4py, for what is not summed natively, without Horovod."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ringtrain.collectives.base import Collective, mark_collective
from ringtrain.errors import UsageError
from ringtrain.messages.defects import describe_failed_import
from ringtrain.messages.ranks import group_ranks, name_ranks
from ringtrain.runtime.world import World

if TYPE_CHECKING:
    import tensorflow as tf

Array = npt.NDArray[Any]

LARGEST_WORD_BYTES = 8
FIRST_WAIT_SECONDS = 60.0  # slow file systems delay TensorFlow's import
_started: set[str] = set()


class MpiCollective(Collective):
    """MPI without negotiation: every rank makes all calls in the same order.

    Use one thread, or TensorFlow functions, which run stateful operations in program order.
    """

    description = "MPI"
    is_ordered = True
    may_use_mpi = True

    def __init__(self, world: World) -> None:
        from mpi4py import MPI

        super().__init__(world)
        self._ranks = MPI.COMM_WORLD

    def all_reduce(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        import tensorflow as tf

        def add(*arrays: Array) -> list[Array]:
            totals = [np.empty_like(array, order="C") for array in arrays]
            for array, total in zip(arrays, totals, strict=True):
                self._ranks.Allreduce(array, total)
            return totals

        # MPI has no half-precision type.
        wide = [tf.cast(tensor, tf.float32) if _is_half(tensor) else tensor for tensor in tensors]
        totals = _call(add, wide, name)
        return [tf.cast(total, tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)]

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        def gather(part: Array) -> list[Array]:
            joined, _ = _gather_rows(part)
            return [joined]

        [joined] = _call(gather, [tensor], name, keeps_rows=False)
        return joined

    def broadcast(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        def share(*arrays: Array) -> list[Array]:
            values = [np.array(array, order="C") for array in arrays]
            for value in values:
                word_bytes = min(value.itemsize, LARGEST_WORD_BYTES)
                self._ranks.Bcast(value.reshape(-1).view(f"u{word_bytes}"), root=0)
            return values

        return _call(share, tensors, name)

    def close(self) -> None:
        finalize_mpi()


def start_mpi() -> Any:
    """MPI_Init waits for all ranks: mpi4py would hold the GIL, and block the watchdog; ctypes releases it."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    if not MPI.Is_initialized():
        _started.add("MPI")
        ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        for ranks in (MPI.COMM_WORLD, MPI.COMM_SELF):
            ranks.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py's default: exceptions
    return MPI


def finalize_mpi() -> None:
    """Skip an MPI that Horovod or a user script started."""
    if "MPI" in _started:
        from mpi4py import MPI

        if not MPI.Is_finalized():
            MPI.Finalize()


def _call(
    function: Callable[..., list[Array]], tensors: Sequence[tf.Tensor], name: str, *, keeps_rows: bool = True
) -> list[tf.Tensor]:
    """Keeps types, and shapes except perhaps the first axis."""
    import tensorflow as tf

    with tf.device("CPU:0"):
        dtypes = [tensor.dtype for tensor in tensors]
        # In eager mode a single output is no list.
        outputs = tf.nest.flatten(tf.numpy_function(function, tensors, dtypes, name="mpi"))
    for tensor, output in zip(tensors, outputs, strict=True):
        output.set_shape(tensor.shape if keeps_rows else [None, *tensor.shape[1:]])
    return mark_collective(outputs, name)


def _is_half(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating and tensor.dtype.size < np.dtype(np.float32).itemsize)


def connect_mpi(world: World) -> MpiCollective:
    try:
        mpi = start_mpi()
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"MPI cannot be loaded: {describe_failed_import(error)}. Install it with mpi4py built against it; or, for "
            "--backend horovod, Horovod."
        ) from error
    require_size(world, "mpi4py", mpi.COMM_WORLD.Get_size())
    if mpi.COMM_WORLD.Get_rank() != world.rank:
        raise UsageError(
            f"{world.launcher} says that this is rank {world.rank}, but MPI says {mpi.COMM_WORLD.Get_rank()}. "
            "Start the run again in a clean shell.",
            reach="rank",
        )
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise UsageError(
            "MPI gives its main thread alone access (MPI_THREAD_FUNNELED or less), and TensorFlow's threads call it. "
            "Use an MPI built with threads, or --backend horovod."
        )
    return MpiCollective(world)


def require_same_carrier(world: World, carrier: str) -> None:
    """Check that all ranks use Horovod, or all MPI alone: a mix deadlocks."""
    who = f"rank {world.rank} on {world.node}"
    text = (
        f"ringtrain: warning: {who} has waited {FIRST_WAIT_SECONDS:g} s for the others by MPI. A rank that has not "
        "started, or has another mpi4py or none, does not come. Look for its own error, and give all the same packages."
    )
    warning = threading.Timer(FIRST_WAIT_SECONDS, print, [text], {"file": sys.stderr, "flush": True})
    warning.daemon = True
    warning.start()
    with contextlib.ExitStack() as stack:
        stack.callback(warning.cancel)
        try:
            mpi = start_mpi()
        except (ImportError, RuntimeError):
            return
        if mpi.COMM_WORLD.Get_size() != world.size:
            return
        ranks = gather_by_mpi([world.node, carrier])
    nodes, carriers = zip(*ranks, strict=True)
    if len({*carriers}) > 1:
        groups = group_ranks(carriers)
        listed = "; ".join(f"{name_ranks(group, nodes)} by {its}" for its, group in groups.items())
        error = UsageError(
            f"the ranks communicate in different ways: {listed}. Start all with the same --backend, in environments "
            "of which all have Horovod or none has."
        )
        error.is_agreed = True
        raise error


def require_size(world: World, who: str, size: int) -> None:
    if size != world.size:
        raise UsageError(
            f"{world.launcher} started {world.size} processes, but {who} sees {size}: the launcher belongs to another "
            f"MPI than Horovod. {_describe_libraries()} Start the run with that MPI's own mpirun, or build Horovod and "
            "mpi4py with the launcher's MPI first in PATH; on cores --backend native needs no Horovod."
        )


def gather_by_mpi(value: Any) -> list[Any]:
    joined, counts = _gather_rows(np.frombuffer(json.dumps(value).encode(), np.uint8))
    return [json.loads(part.tobytes()) for part in np.split(joined, np.cumsum(counts)[:-1])]


def _gather_rows(part: Array) -> tuple[Array, Array]:
    """Return [sum of n_r, ...] and row counts [size]."""
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD
    counts = np.empty(ranks.Get_size(), np.int64)
    ranks.Allgather(np.array([len(part)], np.int64), counts)
    joined = np.empty((counts.sum(), *part.shape[1:]), part.dtype)
    if row_bytes := math.prod(part.shape[1:]) * part.itemsize:
        row = MPI.BYTE.Create_contiguous(row_bytes).Commit()  # byte counts could overflow MPI's int
        ranks.Allgatherv([part, len(part), row], [joined, counts, np.cumsum(counts) - counts, row])
        row.Free()
    return joined, counts


def _describe_libraries() -> str:
    mapped = re.findall(r"(/\S*/libmpi\S*\.so\S*)", Path("/proc/self/maps").read_text())
    libraries = ", ".join(dict.fromkeys(mapped)) or "none"
    try:
        from mpi4py import MPI

        version = MPI.Get_library_version().split(",")[0].strip("\0\n ")
    except (ImportError, RuntimeError) as error:
        version = f"not to be had ({error})"
    return f"Loaded: {libraries}; mpi4py was built for: {version}."
