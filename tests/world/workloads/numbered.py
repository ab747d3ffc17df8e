"""Workloads whose samples, or batches, an object gives by their number."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np

from ringtrain import Pass, Sources, from_arrays, from_grain, from_pydataset
from ringtrain.data.indexed import IndexedSource
from tests.world.workloads.fed import WIDTH, Linear, Sample, samples

COUNT = 11
BAD = 7  # a sample, or a batch
RECORDS = "samples.array_record"


class Samples:
    """As Grain's data sources: samples by number."""

    def __init__(self, fault: str = "") -> None:
        self._fault = fault

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> Any:
        if self._fault == "filtered" and number == BAD:
            return None
        if self._fault == "raises" and number == BAD:
            raise ValueError(f"record {number} is damaged")
        x, y = samples(number, 1)
        return x[0], y[0]


class Batches(keras.utils.PyDataset):
    """A rank's batches of one and of two samples, one after the other; rank 0 has one more than the others."""

    def __init__(self, of: Pass, fault: str, **how: Any) -> None:
        super().__init__(**how)
        self.of, self.fault = of, fault

    def __len__(self) -> int:
        return 3 - min(1, self.of.rank) if self.fault != "empty" else 0

    def __getitem__(self, index: int) -> Sample:
        print(f"rank {self.of.rank} reads batch {index} of pass {self.of.epoch}\n", end="", file=sys.stderr)
        if self.fault == "raises" and index == 1:
            raise ValueError("a batch is damaged")
        return samples(100 * self.of.rank + 10 * self.of.epoch + 2 * index, 1 + index % 2)


class Numbered(Linear):
    """``options``: how the samples are given, and what is wrong with them."""

    options: ClassVar[Mapping[str, Any]] = {"by": "number", "fault": "", "processes": False}

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        fault = self.options["fault"]
        if self.options["by"] == "arrays":
            return Sources(from_arrays(*samples(0, COUNT)))
        if self.options["by"] == "batches":
            how = {"workers": 2, "use_multiprocessing": self.options["processes"]}
            return Sources(from_pydataset(lambda of: Batches(of, fault, **how)))
        if self.options["by"] == "grain":
            grain: Any = importlib.import_module("grain")  # which the tests of it install aside
            if fault == "pass":
                return Sources(from_grain(lambda of: self.batches(grain, of)))
            files = grain.sources.ArrayRecordDataSource(str(data_dir / RECORDS)) if data_dir else Samples()
            dataset = grain.MapDataset.source(files)
            if data_dir:
                dataset = dataset.map(lambda record: np.split(np.frombuffer(record), [WIDTH]))
            return Sources(from_grain(dataset.repeat() if fault == "endless" else dataset))
        return Sources(from_grain(Samples(fault)), IndexedSource(Samples()))

    def batches(self, grain: Any, of: Pass) -> Any:
        """This rank's batches of a pass, by Grain's own order and shards."""
        shard = slice(of.rank, COUNT, of.size)
        dataset = grain.MapDataset.source(Samples())[shard].seed(of.seed).shuffle(seed=of.epoch)
        return dataset.to_iter_dataset().batch(of.local_batch_size)
