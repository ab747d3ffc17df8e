"""A recurrent layer that keeps its state from batch to batch, one state for each row of the batch."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from ringtrain import Sources, Workload, from_arrays

GLOBAL_BATCH_SIZE, STEPS_PER_EPOCH, TIME_STEPS = 6, 4, 3


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Sequences [n, time, 2] and one target each."""
    x = np.random.default_rng(5).normal(size=(GLOBAL_BATCH_SIZE * STEPS_PER_EPOCH, TIME_STEPS, 2))
    return x, x.sum(axis=(1, 2))[:, None]


def number_of_ranks() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))


def create_recurrent(batch_size: int) -> keras.Model:
    """Two recurrent layers with state, one of them with two states."""
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input(batch_shape=(batch_size, TIME_STEPS, 2)),
            keras.layers.LSTM(3, stateful=True, return_sequences=True, name="memory"),
            keras.layers.SimpleRNN(2, stateful=True),
            keras.layers.Dense(1),
        ]
    )


class Rows(Workload):
    """Sequences whose state goes on from batch to batch."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "precision": "float64",
        "optimizer": {"name": "adam", "lr": 0.05},
        "log_every": 1,
    }
    options: ClassVar[Mapping[str, Any]] = {"left_out": 0}

    def create_model(self) -> keras.Model:
        return create_recurrent(GLOBAL_BATCH_SIZE // number_of_ranks())

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        x, y = samples()
        end = len(x) - self.options.get("left_out", 0)
        return Sources(train=from_arrays(x[:end], y[:end]), evaluation=from_arrays(x[:12], y[:12]))

    def loss(self, y: Any, outputs: Any) -> tf.Tensor:
        return keras.losses.mean_squared_error(y, outputs)
