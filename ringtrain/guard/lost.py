"""Explain collectives that fail because another rank is gone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ringtrain.errors import LOST_RANK_SIGN, RingtrainError
from ringtrain.runtime import activity

# What Horovod 0.28 gives every pending collective once its background thread has ended (common.h: SHUT_DOWN_ERROR).
SIGNS = ("Horovod has been shut down", LOST_RANK_SIGN)
NAMED_SECONDS = 1.5  # the watchdog looks each second


class LostRanksError(RingtrainError):
    """Another rank has ended, or cannot be reached."""

    has_lost_rank0 = False  # the one that writes the ``end`` record


_first_lost = ""  # in words; the first whose connection has ended, as others end in its wake
_is_known = threading.Event()


def note_lost(who: str) -> None:
    """The connection of a rank, such as ``rank 1 on node7``, has ended without its leave. The watchdog says so."""
    global _first_lost
    _first_lost = _first_lost or who
    _is_known.set()


@contextlib.contextmanager
def explaining_lost_ranks() -> Iterator[None]:
    """Explain Horovod's error after the end of another rank."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RingtrainError) or not any(sign in str(error) for sign in SIGNS):
            raise
        place = activity.current()[0].words_of_one
        _is_known.wait(NAMED_SECONDS)
        why = (
            "one of them has ended, or the network between them has failed. Look for the first error, which is another "
            "rank's."
        )
        if _first_lost:
            why = (
                "it has ended, or the network to it has failed. Look for its own error; if it wrote none, it was "
                "killed, or its code left by sys.exit or os._exit."
            )
        lost = LostRanksError(f"lost {_first_lost or 'the other ranks'} while this one {place}: {why}")
        lost.has_lost_rank0 = _first_lost.startswith("rank 0 ")
        raise lost from error
