"""Memory that all ranks of a node have open. It belongs to no file, and is gone with the last process that has it."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAME = "ringtrain"  # of the memory, in /proc


@contextlib.contextmanager
def share_memory(local_rank: int, on_node: Callable[[Any], list[Any]]) -> Iterator[int | None]:
    """A descriptor of memory of no bytes, open so long; None if this rank cannot open it. Every rank must call it.

    ``on_node`` gives the JSON value of each rank of the node to each, in the order of the local ranks.
    """
    place: list[Any] | None = None
    descriptor: int | None = None
    if local_rank == 0:
        name = f"{NAME}-{secrets.token_hex(16)}"
        with contextlib.suppress(OSError):  # a limit of the process, or of its container
            descriptor = os.memfd_create(name)
            place = [os.getpid(), descriptor, name]
    [place, *_] = on_node(place)
    if place is not None and local_rank > 0:
        descriptor = _open(*place)
    on_node(None)  # all that can have opened it
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open(process: int, number: int, name: str) -> int | None:
    """Open a file descriptor of another process; None if it is not on this machine or in this container."""
    path = Path(f"/proc/{process}/fd/{number}")
    with contextlib.suppress(OSError):
        if str(path.readlink()).startswith(f"/memfd:{name}"):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    return None
