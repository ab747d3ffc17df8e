"""Workloads whose samples come from a tf.data pipeline."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import tensorflow as tf

from ringtrain import Pass, Sources, augment, from_dataset
from tests.world.workloads.fed import WIDTH, Linear, samples

COUNT = 11  # of samples in a pass


class Whole(Linear):
    """One dataset for all ranks; ``options`` shuffle it, change it, or spoil it."""

    options: ClassVar[Mapping[str, Any]] = {"fault": "", "noise": 0.0, "shuffle": False, "endless": ""}

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        dataset: Any = tf.data.Dataset.from_tensor_slices(samples(0, COUNT))
        if self.options["shuffle"]:
            dataset = dataset.shuffle(COUNT)
        match self.options["fault"]:
            case "another order":
                dataset = dataset.shuffle(COUNT, seed=os.getpid())
            case "no end":
                dataset = dataset.repeat()
            case "batches":
                dataset = dataset.batch(2)
            case "no samples":
                dataset = dataset.take(0)
            case "fewer" | "fewer, unknown":
                dataset = dataset.take(COUNT - 4 * int(os.environ["OMPI_COMM_WORLD_RANK"]))
                if "unknown" in self.options["fault"]:
                    dataset = dataset.filter(lambda x, y: True)
            case "no pairs":
                dataset = dataset.map(lambda x, y: {"image": x, "label": y})
            case "ragged":
                dataset = tf.data.Dataset.from_tensor_slices((tf.ragged.constant([[1.0], [2.0, 3.0]]), [1, 2]))
            case "a list":
                return Sources(from_dataset(list(dataset)))
        if self.options["endless"]:
            is_by_user = self.options["endless"] == "repeated"  # else of unknown length, as files are
            endless = dataset.repeat() if is_by_user else dataset.filter(lambda x, y: True)
            return Sources(from_dataset(endless, steps_per_epoch=4))
        return Sources(from_dataset(dataset))

    def augment(self, x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return x + self.options["noise"] * tf.cast(augment.uniform(keys, 0, (WIDTH,)), x.dtype), y


class Sharded(Linear):
    """Each rank reads its own samples, in another order in each pass; or all read the same, by mistake."""

    options: ClassVar[Mapping[str, Any]] = {"shards": True}

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        return Sources(from_dataset(self.read))

    def read(self, of: Pass) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(samples(0, COUNT))
        if self.options["shards"]:
            dataset = dataset.shard(of.size, of.rank).shuffle(COUNT, seed=of.seed + of.epoch)
        return dataset.batch(of.local_batch_size)
