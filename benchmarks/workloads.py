"""The benchmark's models as workloads of ringtrain: the same models and samples as the peers'."""

from __future__ import annotations

from pathlib import Path

import keras
import tensorflow as tf

from benchmarks.peers.peer_models import MODELS, make_samples
from ringtrain.data.sources import from_arrays
from ringtrain.workloads.base import Sources, Workload


class BenchmarkWorkload(Workload):
    """A model of the benchmark, by class name, on synthetic samples."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        model = MODELS[cls.__name__]
        cls.defaults = {
            "batch_size": model.local_batch_size,
            "optimizer": {"name": model.optimizer.lower(), "lr": model.learning_rate},
        }

    def create_model(self) -> keras.Model:
        return MODELS[type(self).__name__].create()

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        del data_dir, synthetic
        return Sources(from_arrays(*make_samples(MODELS[type(self).__name__])), None)

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)


class CNN(BenchmarkWorkload):
    """CIFAR-10 tutorial's network."""


class WIDE(BenchmarkWorkload):
    """A perceptron of 22 M parameters."""


class MANY(BenchmarkWorkload):
    """300 small tensors."""


class TINY(BenchmarkWorkload):
    """A step of 2 to 3 ms."""


class WIDE_ADAM(BenchmarkWorkload):  # noqa: N801, the model's name
    """WIDE with Adam."""


class MANY_ADAM(BenchmarkWorkload):  # noqa: N801
    """MANY with Adam."""


class TRANSFORMER(BenchmarkWorkload):
    """A small transformer with Adam."""
