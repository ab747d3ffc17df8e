"""``init``: what a script of its own can still be given of a run's settings, and then Horovod."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import horovod.tensorflow as hvd
import keras

from ringtrain.collectives.horovod import connect_horovod, require_same_settings_by_rendezvous
from ringtrain.devices import apply_plan, claim_cores, plan_devices, read_machine, start_tensorflow
from ringtrain.errors import UsageError
from ringtrain.keras import hooks
from ringtrain.world import GLOO_LAUNCHER, World, read_world


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start Horovod, on this rank's own GPU or cores.

    Call it right after the imports: devices, cores and thread pools can be chosen until TensorFlow computes something,
    the communication settings until Horovod starts. What the environment sets wins.

    Args:
        comm: ranks, or a communicator of mpi4py; by default all processes of the launcher.
        process_sets: process sets to create, or ``"dynamic"``.

    Raises:
        UsageError: the launcher's processes do not see each other, Keras does not run on TensorFlow, or the node has
            fewer GPUs than ranks.
    """
    if keras.config.backend() != "tensorflow":
        raise UsageError(
            f"Keras runs on {keras.config.backend()!r}, but Horovod's Keras interface needs TensorFlow. Set "
            "KERAS_BACKEND=tensorflow.",
            reach="run",
        )
    world = read_world(os.environ)
    if not hvd.is_initialized():
        _apply_settings(world)
        if world.launcher == GLOO_LAUNCHER:
            require_same_settings_by_rendezvous(world, os.environ)
        hvd.init(comm, process_sets)
    if comm is None and world.launcher != "no launcher":
        connect_horovod(world)  # started already: it compares what Horovod and the launcher say
    hooks.install()


def _apply_settings(world: World) -> None:
    plan = plan_devices(world, read_machine(os.environ), os.environ, claim_cores=claim_cores)
    apply_plan(plan)
    with contextlib.suppress(RuntimeError):  # TensorFlow has started: its devices and threads are settled
        start_tensorflow(plan, world)
