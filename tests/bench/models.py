"""Models that benchmarks train on made samples, besides the tutorial CNN."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from ringtrain.data.sources import from_arrays
from ringtrain.workloads.base import Sources, Workload

WIDTH = 2700


class Wide(Workload):
    """An MLP of 22 M parameters: four layers, most of whose time is communication and updates."""

    def create_model(self) -> keras.Model:
        layers = keras.layers
        hidden = [layers.Dense(WIDTH, activation="relu") for _ in range(3)]
        return keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(10)], name="wide")

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        del data_dir, synthetic
        generator = np.random.default_rng(0)
        x = generator.standard_normal((2560, WIDTH), np.float32)
        return Sources(from_arrays(x, generator.integers(0, 10, len(x))), None)

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
