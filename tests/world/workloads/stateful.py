"""A binary classifier with Keras metrics that have a state."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from ringtrain import Sources, Workload, from_arrays

NUM_TRAINED, NUM_EVALUATED = 22, 17


class LargestError(keras.metrics.Metric):
    """A maximum, which no sum of states gives."""

    def __init__(self, name: str = "largest", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = tf.reduce_max(tf.abs(tf.cast(y_true, y_pred.dtype) - y_pred[:, 0]))
        self.largest.assign(tf.maximum(self.largest.value, error))

    def result(self) -> Any:
        return self.largest.value


class LastError(LargestError):
    """The error of the last batch, which depends on the order."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(tf.reduce_max(y_pred))


def samples(first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(first + 1)
    x = generator.normal(size=(count, 4))
    return x, (x[:, 0] + generator.normal(size=count) > 0).astype(np.int64)


class Stateful(Workload):
    """Logistic regression."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "global_batch_size": 8,
        "precision": "float64",
        "optimizer": {"name": "sgd", "lr": 0.5},
        "best_metric": "auc",
        "best_direction": "max",
    }

    def create_model(self) -> keras.Model:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        return Sources(from_arrays(*samples(0, NUM_TRAINED)), from_arrays(*samples(100, NUM_EVALUATED)))

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return keras.losses.binary_crossentropy(y[:, None], outputs)

    def metrics(self, y: tf.Tensor, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"accuracy": tf.cast(tf.equal(outputs[:, 0] > 0.5, y > 0), outputs.dtype)}

    def create_metrics(self) -> dict[str, keras.metrics.Metric]:
        return {
            "auc": keras.metrics.AUC(),
            "recall": keras.metrics.Recall(),
            "root": keras.metrics.RootMeanSquaredError(),
            "largest": LargestError(),
        }


class WithOwnMetrics(Stateful):
    """With metrics that a test chooses."""

    chosen: ClassVar[Mapping[str, Any]] = {}

    def create_metrics(self) -> dict[str, keras.metrics.Metric]:
        return {name: create() for name, create in self.chosen.items()}
