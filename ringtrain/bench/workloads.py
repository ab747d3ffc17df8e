"""The benchmark's models as workloads of ringtrain: the same models and samples as the peers'."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ringtrain.bench.peers.peer_models import MODELS, make_samples
from ringtrain.data.sources import from_arrays
from ringtrain.workloads.base import Sources, Workload

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class BenchmarkWorkload(Workload):
    """A model of the benchmark, on synthetic samples."""

    name: ClassVar[str]

    def create_model(self) -> keras.Model:
        return MODELS[self.name].create()

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        del data_dir, synthetic
        return Sources(from_arrays(*make_samples(MODELS[self.name])), None)

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        import keras

        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)


def _defaults(name: str) -> Mapping[str, Any]:
    model = MODELS[name]
    return {"batch_size": model.local_batch_size, "optimizer": {"name": "sgd", "lr": model.learning_rate}}


class CNN(BenchmarkWorkload):
    """The network of the CIFAR-10 tutorial."""

    name = "CNN"
    defaults = _defaults(name)


class WIDE(BenchmarkWorkload):
    """A perceptron of 22 M parameters."""

    name = "WIDE"
    defaults = _defaults(name)


class MANY(BenchmarkWorkload):
    """300 small tensors."""

    name = "MANY"
    defaults = _defaults(name)


class TINY(BenchmarkWorkload):
    """A step of 2 to 3 ms."""

    name = "TINY"
    defaults = _defaults(name)
