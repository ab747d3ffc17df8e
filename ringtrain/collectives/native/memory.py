"""Shared memory of a node's ranks, freed with the last process."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAME = "ringtrain"  # in /proc


@contextlib.contextmanager
def share_memory(local_rank: int, on_node: Callable[[Any], list[Any]]) -> Iterator[int | None]:
    """Yield a descriptor of empty memory; None if this rank cannot open it. Collective.

    ``on_node`` gathers JSON values in local rank order.
    """
    place: list[Any] | None = None
    descriptor: int | None = None
    if local_rank == 0:
        name = f"{NAME}-{secrets.token_hex(16)}"
        with contextlib.suppress(OSError):  # process or container limits
            descriptor = os.memfd_create(name)
            place = [os.getpid(), descriptor, name]
    [place, *_] = on_node(place)
    if place is not None and local_rank > 0:
        descriptor = _open(*place)
    on_node(None)  # barrier: all have opened it
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open(process: int, number: int, name: str) -> int | None:
    """Return None on another machine or in another container."""
    path = Path(f"/proc/{process}/fd/{number}")
    with contextlib.suppress(OSError):
        if str(path.readlink()).startswith(f"/memfd:{name}"):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    return None
