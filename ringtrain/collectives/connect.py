"""The ranks of a run joined, by the backend that carries their communication."""

from __future__ import annotations

from typing import Literal

from ringtrain.collectives.base import Collective
from ringtrain.errors import UsageError
from ringtrain.runtime.world import World


def connect(backend: Literal["auto", "horovod", "solo"], world: World) -> Collective:
    """Join the other ranks.

    Raises:
        UsageError: the backend is not installed, or it sees another world than the launcher.
    """
    if backend == "solo" and world.size > 1:
        raise UsageError(
            f"backend is 'solo', but {world.launcher} started {world.size} processes, each of which would train alone. "
            "Use --backend auto, or start one process.",
            reach="run",
        )
    if backend == "horovod" or (backend == "auto" and world.size > 1):
        from ringtrain.collectives.horovod import connect_horovod

        return connect_horovod(world)
    from ringtrain.collectives.solo import Solo

    return Solo(world)
