"""A workload whose ranks are fed by a generator, one of which goes wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from ringtrain import Sources, Workload, from_generator

BATCHES = 40
FAULT_BATCH = 10


class Fed(Workload):
    """Batches of two samples; ``fault`` of ``rank``: ``raise`` after ten batches, ``end`` there, or ``nothing``."""

    defaults: ClassVar[Mapping[str, Any]] = {"log_every": 1, "batch_size": 2}
    options: ClassVar[Mapping[str, Any]] = {"rank": 0, "fault": ""}

    def create_model(self) -> keras.Model:
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        return Sources(from_generator(self.generate))

    def generate(self, rank: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        is_odd = rank == self.options["rank"]
        for number in range(BATCHES):
            if is_odd and (self.options["fault"] == "nothing" or number == FAULT_BATCH):
                if self.options["fault"] == "raise":
                    raise OSError("the fault of the feed")
                return
            x = np.full((2, 3), number + rank, np.float32) / 100
            yield x, x.sum(axis=1, keepdims=True)

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return tf.square(outputs - y)[:, 0]
