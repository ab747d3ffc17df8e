"""Sequences of different lengths, padded per batch: batches differ in length between ranks and steps."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from ringtrain import Pass, Sources, Workload, from_dataset, from_generator

COUNT, WORDS, WIDTH = 12, 20, 3


def sentences() -> list[list[int]]:
    """Sentence k has k + 1 words, none of them 0."""
    generator = np.random.default_rng(4)
    return [generator.integers(1, WORDS, length + 1).tolist() for length in range(COUNT)]


def generate_padded(rank: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches that a user's own code pads, each to another length."""
    for number in range(rank, COUNT, size):
        words = sentences()[number]
        yield np.array([words]), np.array([float(len(words))])


class Sentences(Workload):
    """The mean of a sentence's embeddings, without the padding, gives a number."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "batch_size": 2,
        "precision": "float64",
        "optimizer": {"name": "sgd", "lr": 0.125},
        "log_every": 1,
    }
    options: ClassVar[Mapping[str, Any]] = {"by": "padded_batch"}

    def create_model(self) -> keras.Model:
        keras.utils.set_random_seed(2)
        words = keras.Input((None,), dtype="int64")
        embedded = keras.layers.Embedding(WORDS, WIDTH, mask_zero=True)(words)
        return keras.Model(words, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(embedded)))

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        x = tf.ragged.constant(sentences(), dtype=tf.int64)
        y = tf.constant([float(len(sentence)) for sentence in sentences()], tf.float64)
        samples = tf.data.Dataset.from_tensor_slices((x, y)).map(lambda x, y: (tf.ensure_shape(x, [None]), y))
        if self.options["by"] == "generator":
            return Sources(from_generator(generate_padded))
        if self.options["by"] == "one dataset":
            return Sources(from_dataset(samples))

        def batches(of: Pass) -> tf.data.Dataset:
            own = samples.shard(of.size, of.rank)
            if self.options["by"] == "rank 0 alone":
                return samples.take(0 if of.rank else COUNT).padded_batch(of.local_batch_size)
            if self.options["by"] == "batch":
                return own.batch(of.local_batch_size)
            if self.options["by"] == "buckets":
                return own.bucket_by_sequence_length(lambda x, y: tf.shape(x)[0], [4, 8], [2, 2, 2])
            return own.padded_batch(of.local_batch_size)

        return Sources(from_dataset(batches))

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return tf.square(outputs[:, 0] - y)
