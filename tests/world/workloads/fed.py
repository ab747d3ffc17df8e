"""Workloads whose ranks are fed their own samples, and one of whose samples cannot be read."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from ringtrain import Feed, Sources, Workload, augment, from_arrays, from_callable, from_generator
from ringtrain.data.sources import ArraySource

WIDTH = 3
SIZES = {0: (4, 1, 3, 2, 5), 1: (2, 6), 2: ()}  # of the batches that each rank is fed in a pass
BAD = 3

Sample = tuple[np.ndarray, np.ndarray]


def samples(first: int, count: int) -> Sample:
    """Samples by number, for whoever wants to train the same by other means."""
    numbers = np.arange(first, first + count)
    x = np.sin(np.outer(numbers + 1, np.arange(1, WIDTH + 1))).astype(np.float64)
    return x, x.sum(axis=1, keepdims=True) + 0.5


def streaming_batches(rank: int) -> Iterator[Sample]:
    """What a rank is fed: its batches one after the other, from sample 100 times the rank on."""
    first = 100 * rank
    for size in SIZES[rank]:
        yield samples(first, size)
        first += size


class Linear(Workload):
    """y from x by one dense layer."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "batch_size": 2,
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.875},  # exact in float32, in which Keras holds them
    }

    def create_model(self) -> keras.Model:
        return keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, kernel_initializer="ones")])

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        return Sources(from_arrays(*samples(0, 12)))

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return keras.losses.mean_squared_error(y, outputs)

    def metrics(self, y: tf.Tensor, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"mean_y": y[:, 0]}


class Fed(Linear):
    """Each rank by a generator of its own; ``options`` make it go wrong, or go on for several passes."""

    options: ClassVar[Mapping[str, Any]] = {"steps_per_epoch": 0, "fault": "", "by": "generator", "noise": 0.0}

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        steps_per_epoch = self.options["steps_per_epoch"] or None
        if self.options["by"] == "callable":
            return Sources(from_callable(self.fetch, steps_per_epoch=steps_per_epoch))
        return Sources(self.feed(steps_per_epoch), from_arrays(*samples(500, 7)))

    def augment(self, x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return x + self.options["noise"] * tf.cast(augment.uniform(keys, 0, (WIDTH,)), x.dtype), y

    def feed(self, steps_per_epoch: int | None) -> Feed:
        def generate(rank: int, size: int) -> Iterator[Sample]:
            for number, (x, y) in enumerate(streaming_batches(rank)):
                if number == 1 and rank == 1 and self.options["fault"] == "shape":
                    yield x[:, :2], y
                if number == 1 and rank == 1 and self.options["fault"] == "exception":
                    raise KeyError("the bug of the feed")
                is_float32 = rank == 1 and self.options["fault"] == "type"
                yield (x.astype(np.float32), y) if is_float32 else (x, y)

        def generate_nothing(rank: int, size: int) -> Iterator[Sample]:
            return iter(())

        return from_generator(
            generate_nothing if self.options["fault"] == "nothing" else generate, steps_per_epoch=steps_per_epoch
        )

    def fetch(self, rank: int, step: int) -> Sample | None:
        batches = list(streaming_batches(rank))
        return batches[step] if step < len(batches) else None


class DamagedSource(ArraySource):
    """A sample cannot be read."""

    def gather(self, indices: tf.Tensor) -> tuple[Any, Any]:
        is_good = tf.reduce_all(indices != BAD)
        with tf.control_dependencies([tf.debugging.Assert(is_good, [f"file {BAD} ends too early"])]):
            return super().gather(tf.identity(indices))


class Damaged(Linear):
    """Twelve samples, of which one cannot be read."""

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        x, y = samples(0, 12)
        return Sources(DamagedSource(tf.constant(x), tf.constant(y), num_samples=12))
