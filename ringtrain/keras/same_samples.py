"""Detection of ranks that train on the same samples, by hashes of the first batches."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.data.tf_data import without_tuner
from ringtrain.messages.ranks import name_ranks

log = logging.getLogger("ringtrain")
NUM_BATCHES = 3
HASHED_VALUES = 2**18
MAX_HELD = 16  # per call of the training function, all in memory


class FirstBatches:
    """A separate iterator feeds them to the training function: a hash within the step would run in every step."""

    def __init__(self) -> None:
        self.hashes: list[str] = []
        self._is_in_fit = self._is_awaited = False

    def begin(self) -> None:
        self.hashes, self._is_in_fit, self._is_awaited = [], True, False

    def end(self) -> None:
        """A user's own loop may validate next."""
        self._is_in_fit = self._is_awaited = False

    def wait(self) -> None:
        """Validation comes later."""
        self._is_awaited = self._is_in_fit and len(self.hashes) < NUM_BATCHES

    def note(self, steps: Iterator[Any], steps_per_call: int) -> Iterator[Any]:
        is_awaited, self._is_awaited = self._is_awaited, False
        return self._note(steps, steps_per_call) if is_awaited and steps_per_call <= MAX_HELD else steps

    def _note(self, steps: Iterator[Any], steps_per_call: int) -> Iterator[Any]:
        for *numbers, iterator in steps:
            is_due = len(self.hashes) < NUM_BATCHES and _is_plain(iterator)
            yield *numbers, self._note_next(iterator, steps_per_call) if is_due else iterator

    def _note_next(self, iterator: Any, number: int) -> Any:
        """Keeps no reference to the batches."""
        batches = list(itertools.islice(iterator, number))
        self.hashes = [*self.hashes, *map(_hash, batches)][:NUM_BATCHES]
        if not batches:
            return iterator
        again = tf.data.Dataset.from_generator(batches.copy, output_signature=iterator.element_spec)
        return iter(without_tuner(again))


def _is_plain(iterator: Any) -> bool:
    parts = tf.nest.flatten(getattr(iterator, "element_spec", None))
    return isinstance(iterator, tf.data.Iterator) and all(type(part) is tf.TensorSpec for part in parts)


def _hash(batch: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in map(np.asarray, tf.nest.flatten(batch)):
        part = array.reshape(-1)[:HASHED_VALUES]
        digest.update(repr(part.tolist()).encode() if array.dtype == object else part.tobytes())
    return digest.hexdigest()


@functools.cache
def first_batches() -> FirstBatches:
    return FirstBatches()


def find_same(hashes: Sequence[Sequence[str]]) -> list[int]:
    """Ranks with equal hashes [ranks, batches]; empty if a rank's batches are all equal, as in a benchmark."""
    telling = [tuple(its) for its in hashes if len({*its}) == NUM_BATCHES]
    twice = next((its for its in telling if telling.count(its) > 1), None)
    return [rank for rank, its in enumerate(hashes) if tuple(its) == twice]


@functools.cache
def warn_of_same(ranks: tuple[int, ...]) -> None:
    log.warning(
        "ringtrain.keras: %s had the very same data in each of the first %d batches of fit(): they "
        "train on the same samples. Give each rank its own, such as by dataset.shard(hvd.size(), hvd.rank()) before "
        "shuffle and batch, or by a part of the arrays.",
        name_ranks(ranks),
        NUM_BATCHES,
    )
