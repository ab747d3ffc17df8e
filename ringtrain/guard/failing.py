"""Report an error of all ranks once, on rank 0."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

from ringtrain.messages.defects import describe_defect
from ringtrain.messages.escaping import escape
from ringtrain.runtime.world import World

MEETING_SECONDS = 1.0  # to wait for the other ranks to fail
LOOK_SECONDS = 0.01
TAG = 1729  # of messages between failing ranks


def is_raised_by_rank0(error: BaseException) -> bool:
    """True if rank 0 raises the same error at the same line now; False on rank 0. Takes up to ``MEETING_SECONDS``."""
    place = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    digest = hashlib.sha256(repr([describe_defect(error), place]).encode()).digest()
    horovod, mpi = sys.modules.get("horovod.tensorflow"), sys.modules.get("mpi4py.MPI")
    if horovod is not None and horovod.is_initialized():
        return horovod.size() > 1 and _meet_over_horovod(horovod, digest)
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and _meet_over_mpi(mpi, digest)


def _meet_over_horovod(horovod: Any, digest: bytes) -> bool:
    """Gather in a tf.function, in which Horovod matches operations by name; eager ones would match any other."""
    found: list[bool] = []

    def meet() -> None:
        import numpy as np
        import tensorflow as tf

        @tf.function(autograph=False)
        def gather(mine: tf.Tensor) -> tf.Tensor:
            return horovod.allgather(mine, name="digest_of_an_error", ignore_name_scope=True)

        with contextlib.suppress(Exception), tf.device("/CPU:0"):  # another rank may have ended Horovod
            digests = gather(tf.constant(np.frombuffer(digest, np.uint8)[None])).numpy()
            found.append(digests[0].tobytes() == digest)

    thread = threading.Thread(target=meet, name="failing", daemon=True)
    thread.start()
    thread.join(MEETING_SECONDS)
    return any(found) and horovod.rank() > 0


def _meet_over_mpi(mpi: Any, digest: bytes) -> bool:
    """Compare by messages, which do not disturb collectives."""
    ranks, end = mpi.COMM_WORLD, time.monotonic() + MEETING_SECONDS
    if ranks.Get_rank() == 0:
        sent = [ranks.Isend(digest, dest=rank, tag=TAG) for rank in range(1, ranks.Get_size())]
        while not mpi.Request.Testall(sent) and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
        return False
    while not ranks.Iprobe(source=0, tag=TAG):
        if time.monotonic() >= end:
            return False
        time.sleep(LOOK_SECONDS)
    told = bytearray(len(digest))
    ranks.Recv(told, source=0, tag=TAG)
    return told == digest


def describe_same(error: BaseException, world: World) -> str:
    return escape(f"rank {world.rank} on {world.node} failed as rank 0 did: {describe_defect(error)}")


@functools.cache
def show_once(world: World) -> None:
    """From now on, only rank 0 prints an error of all ranks."""
    plain = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if isinstance(error, Exception) and is_raised_by_rank0(error):
            sys.stderr.write(f"{describe_same(error, world)}\n")
        else:
            plain(kind, error, where)

    sys.excepthook = show
