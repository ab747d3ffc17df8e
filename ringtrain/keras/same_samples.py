"""Ranks that train on the very same samples: found by hashes of the first batches of each."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ringtrain.messages.ranks import name_ranks

log = logging.getLogger("ringtrain")
NUM_BATCHES = 3


class FirstBatches:
    """Hashes of the first batches that this rank trains in a ``fit``.

    They are taken within the step, which alone sees what is trained: whoever looked into the iterator before would take
    batches from a generator, and a pipeline with an operation more might not be able to say where it is.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._hashes = tf.Variable(tf.zeros([NUM_BATCHES], tf.int64), trainable=False)  # 0: none yet

    def begin(self) -> None:
        """Forget those of an earlier fit."""
        self._hashes.assign(tf.zeros_like(self._hashes))

    def read(self) -> list[int]:
        """The hashes [NUM_BATCHES], after zeros where there were fewer."""
        return self._hashes.numpy().tolist()

    def noting(self, train_step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A training step that notes its data first, until there are enough."""

        def step(data: Any) -> Any:
            with tf.device("CPU:0"):  # where the data come from
                tf.cond(self._hashes[0] == 0, lambda: self._note(data), self._hashes.read_value)
            return train_step(data)

        return step

    def _note(self, data: Any) -> tf.Tensor:
        tensors = [tensor for tensor in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(tensor)]
        hashes = [_hash(tf.io.serialize_tensor(tensor)) for tensor in tensors]
        return self._hashes.assign([*tf.unstack(self._hashes)[1:], _hash(tf.strings.reduce_join(tf.as_string(hashes)))])


def _hash(text: tf.Tensor) -> tf.Tensor:
    return 1 + tf.strings.to_hash_bucket_fast(text, tf.int64.max - 1)


@functools.cache
def first_batches() -> FirstBatches:
    """Those of this process; made once TensorFlow may compute something."""
    return FirstBatches()


def find_same(hashes: Sequence[Sequence[int]]) -> list[int]:
    """The first ranks, of which each has had the same hashes [ranks, NUM_BATCHES] as the others; none where that may be
    meant so: where a rank's own batches are alike, as those of a benchmark are."""
    telling = [tuple(its) for its in hashes if 0 not in its and len({*its}) == NUM_BATCHES]
    twice = next((its for its in telling if telling.count(its) > 1), None)
    return [rank for rank, its in enumerate(hashes) if tuple(its) == twice]


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
