"""ctypes interface of the compiled library."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

LIBRARY = Path(__file__).with_name("libringtrain.so")


class Nodes(NamedTuple):
    """Nodes of a run, and MPI's all-reduce among ranks of equal local rank: its address, and handles for it."""

    size: int = 1
    all_reduce: int | None = None
    communicator: int | None = None
    in_place: int | None = None
    types: Sequence[int] = (0,) * 6  # of float16, bfloat16, float32, float64, int32, int64
    operations: Sequence[int | None] = (0,) * 6  # sums of these


class Operations(NamedTuple):
    all_reduce: Any
    all_gather: Any


@functools.cache
def load_operations() -> Operations | None:
    import tensorflow as tf

    framework = Path(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2")
    if framework.exists():  # older TensorFlow loads it with RTLD_LOCAL, and only Horovod's import changes that
        ctypes.CDLL(str(framework), ctypes.RTLD_GLOBAL)
    try:
        loaded = tf.load_op_library(str(LIBRARY))
        return Operations(loaded.ringtrain_all_reduce, loaded.ringtrain_all_gather)
    except (OSError, tf.errors.OpError, AttributeError):
        return None


def find_nodes(local_rank: int, rank: int) -> Nodes:
    """Collective."""
    from mpi4py import MPI

    of_local_rank = MPI.COMM_WORLD.Split(color=local_rank, key=rank)
    mpi, own = ctypes.CDLL(MPI.__file__), ctypes.CDLL(str(LIBRARY))  # the former has the functions of mpi4py's MPI
    sums = [ctypes.c_void_p(), ctypes.c_void_p()]
    for function, handle in zip((own.ringtrain_add_halves, own.ringtrain_add_bfloat16s), sums, strict=True):
        mpi.MPI_Op_create(function, 1, ctypes.byref(handle))
    types = (MPI.UINT16_T, MPI.UINT16_T, MPI.FLOAT, MPI.DOUBLE, MPI.INT32_T, MPI.INT64_T)
    return Nodes(
        size=of_local_rank.Get_size(),
        all_reduce=ctypes.cast(mpi.MPI_Allreduce, ctypes.c_void_p).value,
        communicator=MPI._handleof(of_local_rank),
        in_place=int(MPI.IN_PLACE),
        types=[MPI._handleof(each) for each in types],
        operations=[*(handle.value for handle in sums), *[MPI._handleof(MPI.SUM)] * 4],
    )


class Event(ctypes.Structure):
    """Times in nanoseconds since 1970."""

    _fields_ = [(name, ctypes.c_int64) for name in ("meaning", "bytes", "begun", "met", "ended")]

    @property
    def figures(self) -> tuple[int, int, int, int]:
        return self.bytes, self.begun, self.met, self.ended


def record(group: int, is_recording: bool) -> list[Event]:
    function = ctypes.CDLL(str(LIBRARY)).ringtrain_record
    function.restype = ctypes.c_int64
    count = function(group, is_recording, None, ctypes.c_int64(0))
    events = (Event * (0 if is_recording else count))()
    function(group, is_recording, events, ctypes.c_int64(len(events)))
    return list(events)


class Patience(NamedTuple):
    """Limits in seconds."""

    spin: float  # before it sleeps
    stall: float  # before it reports; 0: never


def join(descriptor: int, local_rank: int, processes: Sequence[int], patience: Patience, nodes: Nodes) -> int:
    """Return the operation's attribute ``group``; -1 on failure."""
    function = ctypes.CDLL(str(LIBRARY)).ringtrain_join
    numbers = (ctypes.c_int * len(processes))(*processes)
    waits = [ctypes.c_int64(round(seconds * 1e9)) for seconds in patience]
    handles = map(ctypes.c_void_p, (nodes.all_reduce, nodes.communicator, nodes.in_place))
    lists = [(ctypes.c_void_p * len(each))(*each) for each in (nodes.types, nodes.operations)]
    return int(function(descriptor, local_rank, len(processes), numbers, *waits, nodes.size, *handles, *lists))
