"""Workloads that train in no time: 107 made samples, a small dense network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from ringtrain.data.augment import uniform
from ringtrain.data.sources import from_arrays
from ringtrain.workloads.base import Sources, Workload

NUM_SAMPLES = 107
NUM_FEATURES = 6
NUM_CLASSES = 3


class Small(Workload):
    """A regularised classifier with augmentation."""

    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 16, "epochs": 2}

    def create_model(self) -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((NUM_FEATURES,)),
                layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01), name="hidden"),
                layers.Dense(NUM_CLASSES, name="output"),
            ],
            name="small",
        )

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        del data_dir, synthetic
        generator = np.random.default_rng(7)
        x = generator.standard_normal((NUM_SAMPLES, NUM_FEATURES)).astype(np.float32)
        source = from_arrays(x, np.argmax(x[:, :NUM_CLASSES], axis=1))
        return Sources(source, source)

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)

    def metrics(self, y: tf.Tensor, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"accuracy": keras.metrics.sparse_categorical_accuracy(y, outputs)}

    def augment(self, x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return x + 0.1 * uniform(keys, 0, (NUM_FEATURES,)), y


class DropoutAndBatchNorm(Small):
    """With the two kinds of layers whose results depend on the number of ranks by design."""

    def create_model(self) -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((NUM_FEATURES,)),
                layers.Dense(8, activation="tanh"),
                layers.BatchNormalization(name="normalization"),
                layers.Dropout(0.5, name="dropout"),
                layers.Dense(NUM_CLASSES),
            ],
            name="dropout_and_batch_norm",
        )
