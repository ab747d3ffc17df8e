"""What users bring: several inputs and outputs, several losses, a frozen part, metrics and summaries of their own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from ringtrain import Histogram, Images, Sources, Workload, from_arrays

NUM_SAMPLES = 60
SIDE = 4
NUM_CLASSES = 3


class Everything(Workload):
    """From an image and a vector to a class and a number: y is a dict, and so are the outputs."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "batch_size": 8,
        "epochs": 2,
        "log_every": 1,
        "best_metric": "within_one",
        "best_direction": "max",
        "optimizer": {"name": "adam", "lr": 0.01},
    }
    options: ClassVar[Mapping[str, Any]] = {"weight_of_number": 0.5}

    def create_model(self) -> keras.Model:
        image = keras.Input((SIDE, SIDE, 1), name="image")
        vector = keras.Input((2,), name="vector")
        frozen = layers.Conv2D(4, 3, padding="same", activation="relu", trainable=False, name="frozen")
        features = layers.Concatenate()([layers.Flatten()(frozen(image)), vector])
        hidden = layers.Dense(8, activation="tanh", kernel_regularizer="l2", name="hidden")(features)
        outputs = {
            "class": layers.Dense(NUM_CLASSES, name="class")(hidden),
            "number": layers.Dense(1, name="number")(hidden),
        }
        return keras.Model({"image": image, "vector": vector}, outputs, name="everything")

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        generator = np.random.default_rng(3)
        image = generator.random((NUM_SAMPLES, SIDE, SIDE, 1), np.float32)
        vector = generator.standard_normal((NUM_SAMPLES, 2), np.float32)
        number = vector.sum(axis=1, keepdims=True)
        y = {"class": np.digitize(number[:, 0], [-0.5, 0.5]), "number": number}
        source = from_arrays({"image": image, "vector": vector}, y)
        return Sources(source, source)

    def losses(self, y: Mapping[str, tf.Tensor], outputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {
            "class_loss": keras.losses.sparse_categorical_crossentropy(y["class"], outputs["class"], from_logits=True),
            "number_loss": keras.losses.mean_squared_error(y["number"], outputs["number"]),
        }

    def loss(self, y: Mapping[str, tf.Tensor], outputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
        losses = self.losses(y, outputs)
        return losses["class_loss"] + self.options["weight_of_number"] * losses["number_loss"]

    def metrics(self, y: Mapping[str, tf.Tensor], outputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Each loss by itself, and how often the number is less than 1 away."""
        error = tf.abs(tf.cast(y["number"], outputs["number"].dtype) - outputs["number"])[:, 0]
        return {**self.losses(y, outputs), "within_one": tf.cast(error < 1, tf.float32)}

    def summaries(
        self, model: keras.Model, x: Mapping[str, tf.Tensor], y: Mapping[str, tf.Tensor]
    ) -> dict[str, Images | Histogram]:
        numbers = model(x, training=False)["number"]  # in mixed precision of 16 bits
        return {"image": Images(x["image"]), "numbers": Histogram(numbers)}


class CallsPython(Everything):
    """A metric is Python code that calls a ``tf.function``; what ringtrain needs to know early is in its defaults."""

    defaults: ClassVar[Mapping[str, Any]] = {**Everything.defaults, "deterministic": True}

    def metrics(self, y: Mapping[str, tf.Tensor], outputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        metrics = super().metrics(y, outputs)
        within_one = tf.py_function(
            lambda values: tf.function(tf.identity)(values), [metrics["within_one"]], tf.float32
        )
        return {**metrics, "within_one": tf.ensure_shape(within_one, [None])}
