"""The tutorial's network on the same samples through the pipelines that people have: for ``benchmarks input``."""

from __future__ import annotations

import abc
import importlib
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ringtrain.data.formats.cifar10 import IMAGE_SIZE, NUM_CLASSES, load_cifar10
from ringtrain.data.indexed import from_grain, from_pydataset
from ringtrain.data.sources import Pass
from ringtrain.data.tf_data import from_dataset
from ringtrain.workloads.base import Sources
from ringtrain.workloads.cifar10 import NUM_SYNTHETIC, Cifar10, make_samples

SHUFFLED = 4096  # samples in the shuffle buffer


class _Piped(Cifar10):
    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        made = make_samples(NUM_SYNTHETIC, IMAGE_SIZE, NUM_CLASSES) if synthetic else load_cifar10(data_dir)
        return Sources(self.open(*made[0]))

    @abc.abstractmethod
    def open(self, images: Any, labels: Any) -> Any:
        """``images``: uint8 [n, 32, 32, 3]; ``labels``: int64 [n]."""


class OneDataset(_Piped):
    def open(self, images: Any, labels: Any) -> Any:
        return from_dataset(tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(SHUFFLED))


class ShardedDataset(_Piped):
    def open(self, images: Any, labels: Any) -> Any:
        def read(of: Pass) -> tf.data.Dataset:
            mine = tf.data.Dataset.from_tensor_slices((images[of.rank :: of.size], labels[of.rank :: of.size]))
            return mine.shuffle(SHUFFLED, seed=of.seed + of.epoch).batch(of.local_batch_size)

        return from_dataset(read)


class Numbered(keras.utils.PyDataset):
    def __init__(self, images: Any, labels: Any, batch_size: int) -> None:
        super().__init__(workers=1)
        self.images, self.labels, self.batch_size = images, labels, batch_size

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def __getitem__(self, number: int) -> Any:
        part = slice(number * self.batch_size, (number + 1) * self.batch_size)
        return self.images[part], self.labels[part]


class KerasPyDataset(_Piped):
    def open(self, images: Any, labels: Any) -> Any:
        return from_pydataset(
            lambda of: Numbered(images[of.rank :: of.size], labels[of.rank :: of.size], of.local_batch_size)
        )


class GrainDataset(_Piped):
    """A grain.MapDataset, in ringtrain's order."""

    def open(self, images: Any, labels: Any) -> Any:
        grain = importlib.import_module("grain")  # of an extra
        return from_grain(grain.MapDataset.range(len(labels)).map(lambda number: (images[number], labels[number])))
