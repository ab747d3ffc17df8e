"""The ranks that this process has joined, for code that nobody hands a collective, such as a layer of a model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from ringtrain.collectives.base import Collective
from ringtrain.errors import UsageError
from ringtrain.runtime.world import read_world

_joined: Collective | None = None
_find: Callable[[str], Collective | None] | None = None


@contextlib.contextmanager
def having_joined(collective: Collective) -> Iterator[None]:
    """So long these ranks are what ``ranks_for`` gives."""
    global _joined
    before, _joined = _joined, collective
    try:
        yield
    finally:
        _joined = before


def find_by(find: Callable[[str], Collective | None]) -> None:
    """Ask this where ringtrain itself has joined nobody; it gets who needs the ranks, and gives None for no others."""
    global _find
    _find = find


def ranks_for(what: str) -> Collective | None:
    """The ranks of this run; None where this process is alone. ``what`` needs them, in words.

    Raises:
        UsageError: a launcher has started several processes, and nothing has joined them.
    """
    if _joined is not None:
        return _joined if _joined.world.size > 1 else None
    if _find is not None:
        return _find(what)
    if read_world(os.environ).size > 1:
        raise UsageError(
            f"{what} needs to know the ranks, and nothing has joined them. Train by `python -m ringtrain` or "
            "ringtrain.train(), or call ringtrain.keras.init() right after the imports."
        )
    return None
