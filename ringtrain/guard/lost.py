"""A rank whose collectives fail because another rank is gone: told as what it is, a consequence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ringtrain import activity
from ringtrain.errors import LOST_RANK_SIGN, RingtrainError

# What Horovod 0.28 gives every pending collective once its background thread has ended (common.h: SHUT_DOWN_ERROR).
SIGNS = ("Horovod has been shut down", LOST_RANK_SIGN)


class LostRanksError(RingtrainError):
    """Another rank has ended, or cannot be reached."""


@contextlib.contextmanager
def explaining_lost_ranks() -> Iterator[None]:
    """Give Horovod's error after another rank's end, which shows where this rank was, words that say what it is.

    Raises:
        LostRanksError: in place of TensorFlow's and Horovod's own.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, RingtrainError) or not any(sign in str(error) for sign in SIGNS):
            raise
        raise LostRanksError(
            f"lost the other ranks while it {activity.current()[0].words_of_one}: one of them has ended, or the "
            "network between them has failed. Look for the first error, which is another rank's."
        ) from error
