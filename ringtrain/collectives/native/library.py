"""ctypes interface of the compiled library."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

LIBRARY = Path(__file__).with_name("libringtrain.so")


class Nodes(NamedTuple):
    """Nodes of a run, and MPI among ranks of equal local rank."""

    size: int = 1
    mine: int = 0
    send_receive: int | None = None  # address, and handles for it
    communicator: int | None = None
    byte: int | None = None


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
    send_receive = ctypes.CDLL(MPI.__file__).MPI_Sendrecv  # from mpi4py's own library
    address = ctypes.cast(send_receive, ctypes.c_void_p).value
    handles = [MPI._handleof(handle) for handle in (of_local_rank, MPI.BYTE)]
    return Nodes(of_local_rank.Get_size(), of_local_rank.Get_rank(), address, *handles)


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
    handles = map(ctypes.c_void_p, (nodes.send_receive, nodes.communicator, nodes.byte))
    waits = [ctypes.c_int64(round(seconds * 1e9)) for seconds in patience]
    return int(function(descriptor, local_rank, len(processes), numbers, *waits, nodes.size, nodes.mine, *handles))
