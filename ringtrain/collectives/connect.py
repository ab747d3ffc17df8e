"""The ranks of a run joined, by the backend that carries their communication."""

from __future__ import annotations

import os
from typing import Any, Literal

from ringtrain.collectives.base import Collective, Solo
from ringtrain.collectives.objects import all_gather_object
from ringtrain.errors import UsageError
from ringtrain.runtime.world import World


def connect(backend: Literal["auto", "horovod", "solo"], world: World) -> Collective:
    """Join the other ranks."""
    if backend == "solo" and world.size > 1:
        raise UsageError(
            f"backend is 'solo', but {world.launcher} started {world.size} processes, each of which would train alone. "
            "Use --backend auto, or start one process."
        )
    if backend == "horovod" or (backend == "auto" and world.size > 1):
        from ringtrain.collectives.horovod import connect_horovod

        return connect_horovod(world)
    return Solo(world)


def share_memory(collective: Collective) -> Collective:
    """The same ranks, whose ordered sums go through memory where all of them are on the cores of one node.

    Every rank must call it, after they have met.
    """
    from ringtrain.collectives.horovod import HorovodCollective

    world = collective.world
    if not isinstance(collective, HorovodCollective) or world.local_size < world.size:
        return collective
    import tensorflow as tf

    from ringtrain.collectives.shared_memory import SharedMemory
    from ringtrain.collectives.shared_window import share_window

    def on_all(value: Any) -> list[Any]:
        return all_gather_object(collective, value, name="shared_memory")

    facts = on_all([bool(tf.config.get_visible_devices("GPU")), len(os.sched_getaffinity(0))])
    if any(has_gpu for has_gpu, _ in facts):
        return collective
    window = share_window(world.rank, world.size, on_all)
    if window is None:
        return collective
    has_one_core = all(num_cores == 1 for _, num_cores in facts)
    if has_one_core:
        collective.yield_core()
    return SharedMemory(collective, window, overlaps_compute=not has_one_core)
