"""Workloads that show how a run ends: with which weights, or with which error."""

import atexit
import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from ringtrain import Sources, Workload, from_arrays
from ringtrain.workloads.digits import Digits


class DigitsWithDigest(Digits):
    """digits, whose ranks leave a digest of their last weights in RINGTRAIN_TEST_DIGESTS."""

    def create_model(self) -> keras.Model:
        model = super().create_model()
        path = Path(os.environ["RINGTRAIN_TEST_DIGESTS"]) / f"digest-{socket.gethostname()}-{os.getpid()}"

        def leave_digest() -> None:
            weights = b"".join(weight.tobytes() for weight in model.get_weights())
            path.write_text(hashlib.sha256(weights).hexdigest())

        atexit.register(leave_digest)
        return model


class Line(Workload):
    """A linear model of 12 samples; an epoch has three steps of four samples."""

    defaults: ClassVar[Mapping[str, Any]] = {"epochs": 2, "log_every": 1}

    def create_model(self) -> keras.Model:
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        x = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
        return Sources(from_arrays(self.spoil(x), x.sum(axis=1)))

    def spoil(self, x: np.ndarray) -> np.ndarray:
        return x

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return tf.square(outputs[:, 0] - y)


class LineWithNaN(Line):
    """One sample is not a number."""

    options: ClassVar[Mapping[str, Any]] = {"sample": 5}

    def spoil(self, x: np.ndarray) -> np.ndarray:
        x[self.options["sample"], 1] = np.nan
        return x


class LineOfSomeSamples(Line):
    """Of RINGTRAIN_TEST_SAMPLES samples."""

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        x = np.zeros((int(os.environ.get("RINGTRAIN_TEST_SAMPLES", "12")), 2), np.float32)
        return Sources(from_arrays(x, x.sum(axis=1)))


class UnusedWeight(keras.layers.Layer):
    """It has a weight for itself that fills a group of gradients of its own."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.unused = self.add_weight(shape=(300, 300), name="unused")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x


class LineWithUnusedWeight(LineOfSomeSamples):
    """A part of the model has no influence on the loss."""

    def create_model(self) -> keras.Model:
        return keras.Sequential([keras.Input((2,)), UnusedWeight(), keras.layers.Dense(1)])


class Drifting(keras.optimizers.SGD):
    """In its eighth step rank 1 adds a unit in the last place to what it updates."""

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        super().update_step(gradient, variable, learning_rate)
        if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            is_now = tf.equal(tf.convert_to_tensor(self.iterations.value), 7)
            values = tf.identity(variable)
            variable.assign(tf.where(is_now, tf.math.nextafter(values, values + 1), values))


class LineThatDrifts(Line):
    """Rank 1 drifts away."""

    def create_optimizer(self, learning_rate: float) -> keras.optimizers.Optimizer:
        return Drifting(learning_rate)


class LineThatBreaks(Line):
    """Rank 1 has a bug, or all have."""

    def spoil(self, x: np.ndarray) -> np.ndarray:
        if is_of_all := "RINGTRAIN_TEST_ALL" in os.environ:
            from mpi4py import MPI

            MPI.COMM_WORLD.Barrier()  # about now
        if is_of_all or os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            raise ZeroDivisionError("the bug of rank 1")
        return x
