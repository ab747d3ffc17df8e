"""The network of TensorFlow's CIFAR-10 tutorial (1.07 M parameters) on made images, as a workload and plainly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from ringtrain.data.sources import from_arrays
from ringtrain.workloads.base import Sources, Workload

NUM_IMAGES = 12_800
IMAGE_SHAPE = (24, 24, 3)
NUM_CLASSES = 10


def make_images() -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 24, 24, 3] float32 and labels [n] int64."""
    generator = np.random.default_rng(0)
    images = generator.standard_normal((NUM_IMAGES, *IMAGE_SHAPE), np.float32)
    return images, generator.integers(0, NUM_CLASSES, NUM_IMAGES)


def create_model() -> keras.Model:
    """Two convolutions with local response normalisation and pooling, two dense layers, logits."""
    return keras.Sequential(
        [
            keras.Input(IMAGE_SHAPE),
            layers.Conv2D(64, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(3, 2, padding="same"),
            layers.Lambda(normalize_responses),
            layers.Conv2D(64, 5, padding="same", activation="relu"),
            layers.Lambda(normalize_responses),
            layers.MaxPooling2D(3, 2, padding="same"),  # [n, 6, 6, 64]
            layers.Flatten(),
            layers.Dense(384, activation="relu"),
            layers.Dense(192, activation="relu"),
            layers.Dense(NUM_CLASSES),
        ],
        name="tutorial_cnn",
    )


def normalize_responses(images: tf.Tensor) -> tf.Tensor:
    return tf.nn.local_response_normalization(images, depth_radius=4, bias=1.0, alpha=0.001 / 9, beta=0.75)


class TutorialCNN(Workload):
    """The network under ringtrain."""

    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 128, "optimizer": {"name": "sgd", "lr": 0.01}}

    def create_model(self) -> keras.Model:
        return create_model()

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        del data_dir, synthetic
        return Sources(from_arrays(*make_images()), None)

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
