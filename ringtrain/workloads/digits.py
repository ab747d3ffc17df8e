"""digits: 1,797 scanned handwritten digits of 8x8 pixels. The default workload.

The images are in ``digits.npz``: Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, https://doi.org/10.24432/C50P49, CC BY 4.0. ``digits.txt`` describes the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringtrain.data.sources import from_arrays
from ringtrain.workloads.base import Classifier, Sources

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

NUM_CLASSES = 10
FILE = Path(__file__).with_suffix(".npz")


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images (uint8 [1797, 8, 8], grey levels 0 to 16) and labels (int64 [1797])."""
    with np.load(FILE, allow_pickle=False) as arrays:
        return arrays["images"], arrays["labels"].astype(np.int64)


class Digits(Classifier):
    defaults: ClassVar[Mapping[str, Any]] = {
        "epochs": 30,
        "batch_size": 32,
        "optimizer": {"name": "adam", "lr": 2e-3, "schedule": "cosine"},
        "best_metric": "accuracy",
        "best_direction": "max",
    }

    def create_model(self) -> keras.Model:
        import keras
        from keras import layers

        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(32, 3, padding="same", activation="relu"),
                layers.Conv2D(64, 3, padding="same", activation="relu"),
                layers.MaxPooling2D(),  # [n, 4, 4, 64]
                layers.Conv2D(64, 3, padding="same", activation="relu"),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(NUM_CLASSES),
            ],
            name="digits",
        )

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        images, labels = load_digits()
        if synthetic:
            images = np.random.default_rng(0).integers(0, 17, images.shape)
        images = (images / 16).astype(np.float32)[..., np.newaxis]  # [n, 8, 8, 1] in [0, 1]
        with np.load(FILE, allow_pickle=False) as arrays:
            train, evaluation = arrays["train"], arrays["evaluation"]  # indices, with equal shares of the classes
        return Sources(from_arrays(images[train], labels[train]), from_arrays(images[evaluation], labels[evaluation]))

    def augment(self, x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        from ringtrain.data.augment import random_shift

        return random_shift(x, keys, max_pixels=1), y
