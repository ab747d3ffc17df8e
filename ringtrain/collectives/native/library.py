"""The compiled operation: found, loaded, and joined to the other ranks."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

LIBRARY = Path(__file__).with_name("libringtrain.so")


class Nodes(NamedTuple):
    """The nodes of a run: by which MPI a rank meets those with its local rank on the others."""

    size: int = 1
    mine: int = 0
    send_receive: int | None = None  # the address of MPI_Sendrecv, and handles for it
    communicator: int | None = None
    byte: int | None = None


class Operations(NamedTuple):
    """TensorFlow's functions of the operations."""

    all_reduce: Any
    all_gather: Any


@functools.cache
def load_operations() -> Operations | None:
    """The operations; None if they were not compiled, or cannot be loaded here."""
    import tensorflow as tf

    try:
        loaded = tf.load_op_library(str(LIBRARY))
        return Operations(loaded.ringtrain_all_reduce, loaded.ringtrain_all_gather)
    except (OSError, tf.errors.OpError, AttributeError):
        return None


def find_nodes(local_rank: int, rank: int) -> Nodes:
    """The nodes of a run over MPI. Every rank must call it."""
    from mpi4py import MPI

    of_local_rank = MPI.COMM_WORLD.Split(color=local_rank, key=rank)
    send_receive = ctypes.CDLL(MPI.__file__).MPI_Sendrecv  # of the library that mpi4py is linked with
    address = ctypes.cast(send_receive, ctypes.c_void_p).value
    handles = [MPI._handleof(handle) for handle in (of_local_rank, MPI.BYTE)]
    return Nodes(of_local_rank.Get_size(), of_local_rank.Get_rank(), address, *handles)


class Event(ctypes.Structure):
    """A sum that was made: its operation's attribute, bytes, and moments in nanoseconds since 1970."""

    _fields_ = [(name, ctypes.c_int64) for name in ("meaning", "bytes", "begun", "met", "ended")]

    @property
    def figures(self) -> tuple[int, int, int, int]:
        return self.bytes, self.begun, self.met, self.ended


def record(group: int, is_recording: bool) -> list[Event]:
    """Record a group's sums from now on, or no more; then those that were recorded."""
    function = ctypes.CDLL(str(LIBRARY)).ringtrain_record
    function.restype = ctypes.c_int64
    count = function(group, is_recording, None, ctypes.c_int64(0))
    events = (Event * (0 if is_recording else count))()
    function(group, is_recording, events, ctypes.c_int64(len(events)))
    return list(events)


class Patience(NamedTuple):
    """Time limits for waiting for another rank, in seconds."""

    spin: float  # until it sleeps
    stall: float  # until it says so; 0: never


def join(descriptor: int, local_rank: int, processes: Sequence[int], patience: Patience, nodes: Nodes) -> int:
    """Join the ranks with these process numbers in the memory that all of a node have open; -1 if that fails.

    What it returns is the operation's attribute ``group``.
    """
    function = ctypes.CDLL(str(LIBRARY)).ringtrain_join
    numbers = (ctypes.c_int * len(processes))(*processes)
    handles = map(ctypes.c_void_p, (nodes.send_receive, nodes.communicator, nodes.byte))
    waits = [ctypes.c_int64(round(seconds * 1e9)) for seconds in patience]
    return int(function(descriptor, local_rank, len(processes), numbers, *waits, nodes.size, nodes.mine, *handles))
