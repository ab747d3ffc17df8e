"""The connection to the other ranks, kept from run to run of one process.

A process can start MPI only once. ``ringtrain.train`` may be called several times, so that the first call connects, and
the end of the program closes.
"""

from __future__ import annotations

import atexit
import threading
from typing import TYPE_CHECKING

from ringtrain.errors import UsageError
from ringtrain.runtime import shutdown

if TYPE_CHECKING:
    from ringtrain.collectives import Collective


class KeptConnection:
    """The collective of all runs of this process, which is closed when the program ends."""

    def __init__(self, collective: Collective, backend: str) -> None:
        """``backend``: as set for the first run."""
        self.collective = collective
        self._backend = backend
        self._failed_code = 0
        self._closing = threading.Lock()

    def require_backend(self, backend: str) -> None:
        """Raise UsageError if a later run sets another backend."""
        if backend != self._backend:
            raise UsageError(
                f"backend is {backend!r}, but the first run of this process has connected the ranks with backend "
                f"{self._backend!r}, and a process connects only once. Set the same backend for all runs of a script."
            )

    def note_end(self, exit_code: int) -> None:
        """Note the exit code of a run that has ended on all ranks."""
        self._failed_code = exit_code

    def close(self) -> None:
        """Leave the other ranks, at the end of the program.

        If only this rank fails, after a run, its exit ends the others, which may wait for it in their next run.
        """
        if not self._closing.acquire(blocking=False):
            return
        exit_code = shutdown.earned_code()
        if exit_code not in (0, self._failed_code):
            self.collective.abort(exit_code)
        with shutdown.waiting_for_ranks():
            self.collective.close()


_kept: KeptConnection | None = None


def kept_connection() -> KeptConnection | None:
    """Return the connection of earlier runs of this process."""
    return _kept


def keep_connection(collective: Collective, backend: str) -> KeptConnection:
    """Keep a connection until the program ends."""
    global _kept
    _kept = KeptConnection(collective, backend)
    shutdown.close_before_exit(_kept.close)
    atexit.register(_kept.close)
    return _kept
