"""``init``: devices and settings for a user script, then Horovod."""

from __future__ import annotations

import os
from typing import Any, Literal

import horovod.tensorflow as hvd
import keras

from ringtrain.collectives.horovod import connect_horovod, require_same_settings_by_rendezvous
from ringtrain.collectives.native.library import LIBRARY
from ringtrain.config import Config
from ringtrain.errors import UsageError
from ringtrain.guard.failing import show_once
from ringtrain.keras import hooks
from ringtrain.keras.collective import choose_backend, is_elastic, log, note_cores, wants_native_sums
from ringtrain.runtime.devices import Needs, describe_cores, start_tensorflow
from ringtrain.runtime.shutdown import allow, watch_end
from ringtrain.runtime.world import GLOO_LAUNCHER, World, read_world
from ringtrain.training.joining import take_devices

_has_begun = False  # init() has started Horovod; with MPI only possible once


def init(
    comm: Any = None,
    process_sets: Any = None,
    *,
    backend: Literal["auto", "horovod"] = "auto",
    exit_timeout: float = Config.exit_timeout,
) -> None:
    """Start Horovod, on this rank's own GPU or cores.

    Call it right after the imports: devices, cores and thread pools are fixed once TensorFlow has computed something.
    Environment variables take precedence.

    Args:
        comm: ranks, or a communicator of mpi4py; default: all processes of the launcher.
        process_sets: process sets to create, or ``"dynamic"``.
        backend: the same on all ranks. ``"horovod"``: Horovod reduces everything. ``"auto"``: in a ``fit`` with a known
            number of steps, ranks on one node's cores sum gradients in shared memory; Horovod does the rest. With one
            core per rank, TensorFlow runs one operation at a time (TF_NUM_INTEROP_THREADS=1, unless set): Python code
            in a step or a ``tf.data`` pipeline must not call a ``tf.function``.
        exit_timeout: seconds for threads, child processes and ``atexit`` functions after the script ends; 0: no limit.
            The wait for other ranks has no limit.

    Raises:
        UsageError: unknown backend; the launcher's processes do not see each other; Keras is not on TensorFlow; fewer
            GPUs than ranks on the node.
    """
    global _has_begun
    if keras.config.backend() != "tensorflow":
        raise UsageError(
            f"Keras runs on {keras.config.backend()!r}, but Horovod's Keras interface needs TensorFlow. Set "
            "KERAS_BACKEND=tensorflow."
        )
    choose_backend(backend)
    world = read_world(os.environ)
    if not hvd.is_initialized():
        _take_devices(world)
        if not is_elastic():  # elastic: rank 0 may have passed this long ago
            if _has_begun and comm is None and world.launcher != GLOO_LAUNCHER:
                _require_mpi()
            require_same_settings_by_rendezvous(world)
        _has_begun = True
        hvd.init(comm, process_sets)
    if comm is None and world.launcher != "no launcher" and not is_elastic():
        connect_horovod(world)  # also if started already: compares Horovod's and the launcher's ranks
    hooks.install()
    show_once(world)
    allow(exit_timeout, f"rank {world.rank} on {world.node}")
    watch_end(has_left_ranks=False)


def _take_devices(world: World) -> None:
    # Horovod's processes need equal settings; ours depend on the world, which differs for a late rank.
    one_at_a_time = wants_native_sums() and LIBRARY.exists()
    plan = take_devices(world, Needs(horovod=not is_elastic(), one_at_a_time=one_at_a_time, ends_stalls=True))
    if plan.why_unpinned:
        note_cores(f"rank {world.rank} on {describe_cores(plan)}")
    try:
        start_tensorflow(plan, world)
    except RuntimeError as error:  # devices and threads are fixed
        if not _has_begun:
            log.warning(
                "ringtrain.keras: rank %d called init() when TensorFlow had computed something: devices and threads "
                "are unchanged. Call it right after the imports. (%s)",
                world.rank,
                error,
            )


def _require_mpi() -> None:
    """A process can start MPI only once; Horovod would abort."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        has_ended = MPI.Is_finalized()
    except ImportError:  # then Horovod started MPI
        has_ended = True
    if has_ended:
        raise UsageError(
            "init() was called after shutdown(), which has ended MPI, and a process can start MPI once only. Leave "
            "shutdown() out: a rank leaves the others at the end of its script."
        )
