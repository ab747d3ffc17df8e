"""A workload that reads small images from files in each step, so that what happens to the files happens to it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from ringtrain import Sources, Workload, load_image_folder

SIDE = 8
CLASSES = ("cat", "dog")
IMAGES_PER_CLASS = 20


def make_images(directory: Path) -> None:
    """PNG files: 40 to train on, 4 to evaluate on."""
    generator = np.random.default_rng(0)
    for part, count in (("train", IMAGES_PER_CLASS), ("test", 2)):
        for name in CLASSES:
            folder = directory / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                image = generator.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
                (folder / f"{number}.png").write_bytes(tf.io.encode_png(image).numpy())


class Folder(Workload):
    """Which of two classes an image of ``data_dir`` is; a step takes 20 ms at least."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "global_batch_size": 8,
        "epochs": 200,
        "log_every": 1,
        "checkpoint_every": 5,
        "eval_every_epochs": 0,
    }

    def create_model(self) -> keras.Model:
        return keras.Sequential([keras.Input((SIDE, SIDE, 3)), keras.layers.Flatten(), keras.layers.Dense(2)])

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        assert data_dir is not None
        return Sources(*load_image_folder(data_dir, image_size=None, channels=3))

    def augment(self, x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        def wait(labels: np.ndarray) -> np.ndarray:
            time.sleep(0.02)
            return labels

        return tf.cast(x, tf.float32) / 255, tf.ensure_shape(tf.numpy_function(wait, [y], y.dtype), y.shape)

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
