"""Ranks that train on the very same samples: found by hashes of the first batches of each."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.messages.ranks import name_ranks

log = logging.getLogger("ringtrain")
NUM_BATCHES = 3
HASHED_BYTES = 2**20  # of each tensor


class FirstBatches:
    """Hashes of the first batches that this rank trains in a ``fit``.

    They are read here, and given to the training function by an iterator of their own: what hashed them within the step
    would be in every step.
    """

    def __init__(self) -> None:
        self.hashes: list[str] = []
        self._is_awaited = False

    def begin(self) -> None:
        """What a ``fit`` asks for next is what it trains on; validation comes later."""
        self.hashes, self._is_awaited = [], True

    def note(self, steps: Iterator[Any], steps_per_call: int) -> Iterator[Any]:
        """The steps of an epoch as Keras numbers them, each with its iterator, of which the first are noted."""
        is_first_epoch, self._is_awaited = self._is_awaited, False
        return self._note(steps, steps_per_call) if is_first_epoch else steps

    def _note(self, steps: Iterator[Any], steps_per_call: int) -> Iterator[Any]:
        for *numbers, iterator in steps:
            given = iterator
            if len(self.hashes) < NUM_BATCHES and _is_plain(iterator):
                batches = list(itertools.islice(iterator, steps_per_call))
                self.hashes += [_hash(batch) for batch in batches]
                if batches:
                    given = iter(
                        tf.data.Dataset.from_generator(lambda b=batches: b, output_signature=iterator.element_spec)
                    )
            yield *numbers, given


def _is_plain(iterator: Any) -> bool:
    """Whether batches are dense tensors, on the host."""
    parts = tf.nest.flatten(getattr(iterator, "element_spec", None))
    return isinstance(iterator, tf.data.Iterator) and all(type(part) is tf.TensorSpec for part in parts)


def _hash(batch: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in map(np.asarray, tf.nest.flatten(batch)):
        data = repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).data.cast("B")
        digest.update(data[:HASHED_BYTES])
    return digest.hexdigest()


@functools.cache
def first_batches() -> FirstBatches:
    """Those of this process."""
    return FirstBatches()


def find_same(hashes: Sequence[Sequence[str]]) -> list[int]:
    """The first ranks, of which each has had the same hashes [ranks, batches] as the others; none where that may be
    meant so: where a rank's own batches are alike, as those of a benchmark are."""
    telling = [tuple(its[:NUM_BATCHES]) for its in hashes if len({*its[:NUM_BATCHES]}) == NUM_BATCHES]
    twice = next((its for its in telling if telling.count(its) > 1), None)
    return [rank for rank, its in enumerate(hashes) if tuple(its[:NUM_BATCHES]) == twice]


@functools.cache
def warn_of_same(ranks: tuple[int, ...]) -> None:
    """Once in a process."""
    log.warning(
        "ringtrain.keras: %s had the very same data, to the last bit, in each of the first %d batches of fit(): they "
        "train on the same samples. Give each rank its own, such as by dataset.shard(hvd.size(), hvd.rank()) before "
        "shuffle and batch, or by a part of the arrays.",
        name_ranks(ranks),
        NUM_BATCHES,
    )
