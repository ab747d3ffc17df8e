"""Current collective, for code without access to it, such as layers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from ringtrain.collectives.base import Collective, Solo
from ringtrain.errors import UsageError
from ringtrain.runtime.world import World, read_world

_joined: Collective | None = None


@contextlib.contextmanager
def use_collective(collective: Collective) -> Iterator[None]:
    global _joined
    before, _joined = _joined, collective
    try:
        yield
    finally:
        _joined = before


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Use for code that only one rank runs."""
    world = World(rank=0, size=1, local_rank=0, local_size=1, node="", launcher="no launcher")
    with use_collective(Solo(world)):
        yield


def is_alone() -> bool:
    """True in a block of ``alone``, or if this run has one process."""
    return _joined is not None and _joined.world.size == 1


def current_collective(what: str) -> Collective | None:
    """Return the collective of this run, or Horovod's in a script; None for one process.

    Raises:
        UsageError: several processes that nothing has joined.
    """
    if _joined is not None:
        return _joined if _joined.world.size > 1 else None
    world, horovod = read_world(os.environ), sys.modules.get("horovod.tensorflow")
    if horovod is not None and horovod.is_initialized():
        from ringtrain.collectives.horovod import HorovodCollective

        return HorovodCollective(world, horovod) if horovod.size() > 1 else None
    if world.size > 1:
        raise UsageError(
            f"{what} needs to know the ranks, and nothing has joined them. Train by `python -m ringtrain` or "
            "ringtrain.train(), or call ringtrain.keras.init() right after the imports."
        )
    return None
