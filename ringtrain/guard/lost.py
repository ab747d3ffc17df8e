"""Explanation of collectives that fail because another rank is gone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ringtrain.errors import LOST_RANK_SIGN, RingtrainError
from ringtrain.runtime import activity

# Horovod 0.28's error once its background thread has ended (common.h: SHUT_DOWN_ERROR), and Gloo's file before that.
SIGNS = ("Horovod has been shut down", "gloo/transport/tcp/pair.cc", LOST_RANK_SIGN)
NAMED_SECONDS = 1.5  # the watchdog checks each second


class LostRanksError(RingtrainError):
    has_lost_rank0 = False  # which writes the ``end`` record


_first_lost = ""  # the first lost rank; others follow it
_is_known = threading.Event()


def note_lost(who: str) -> None:
    """``who``: such as ``rank 1 on node7``."""
    global _first_lost
    _first_lost = _first_lost or who
    _is_known.set()


@contextlib.contextmanager
def explaining_lost_ranks() -> Iterator[None]:
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
