"""polynomial: fits the coefficients of y = 5x² + 3. The smallest workload."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringtrain.data.sources import from_arrays
from ringtrain.workloads.base import Sources, Workload

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

COEFFICIENTS = (5.0, 0.0, 3.0)  # of x², x and 1
NUM_SAMPLES = {"train": 1_000, "evaluation": 100}


class Polynomial(Workload):
    """Linear model on x², x and 1; one weight ``coefficients`` [3, 1]."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "steps": 1_000,
        "batch_size": 100,
        "eval_every_epochs": 20,
        "optimizer": {"name": "adam", "lr": 0.1},
    }

    def create_model(self) -> keras.Model:
        import keras

        x = keras.Input((1,))
        features = keras.ops.concatenate([x * x, x, keras.ops.ones_like(x)], axis=-1)  # [n, 3]
        outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="coefficients")(features)
        return keras.Model(x, outputs, name="polynomial")

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        return Sources(*(from_arrays(*make_samples(NUM_SAMPLES[name])) for name in ("train", "evaluation")))

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        import keras

        return keras.losses.mean_squared_error(y, outputs)

    def metrics(self, y: tf.Tensor, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        import keras

        return {"absolute_error": keras.losses.mean_absolute_error(y, outputs)}


def make_samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return x in [-1, 1] and y, float32 [count, 1]."""
    x = np.linspace(-1, 1, count)[:, np.newaxis]
    return x.astype(np.float32), np.polyval(COEFFICIENTS, x).astype(np.float32)
