"""A workload for runs that are interrupted: a ledger among its metrics, and steps and saves that can take a while."""

import ctypes
import itertools
import math
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from ringtrain.data.augment import random_shift
from ringtrain.data.sources import ArraySource, from_arrays
from ringtrain.files import atomic
from ringtrain.workloads.base import Histogram, Images, Sources, Workload

NUM_SAMPLES = 50
SIDE = 4
# Each metric of the ledger counts so many samples, each as one digit of a number with this base.
SAMPLES_PER_METRIC, COUNT_BASE = 8, 4
NUM_LEDGER_METRICS = math.ceil(NUM_SAMPLES / SAMPLES_PER_METRIC)
HANG_STEP = 30


def seconds_of(what: str) -> float:
    return float(os.environ.get(f"RINGTRAIN_TEST_{what}_SECONDS", "0"))


def flush_slowly(descriptor: int) -> None:
    if "/checkpoints" in os.readlink(f"/proc/self/fd/{descriptor}"):
        time.sleep(seconds_of("SAVE"))
    os.fsync(descriptor)


if seconds_of("SAVE"):
    atomic.flush = flush_slowly


def read_ledger(metrics: Mapping[str, float], num_samples: int) -> list[int]:
    """Numbers of the samples that a step of ``num_samples`` trained, from its metrics, which are means."""
    trained = []
    for number in range(NUM_LEDGER_METRICS):
        digits = round(metrics[f"samples_{number}"] * num_samples)
        for position in range(SAMPLES_PER_METRIC):
            digits, count = divmod(digits, COUNT_BASE)
            trained += count * [number * SAMPLES_PER_METRIC + position]
    return trained


def my_rank() -> str:
    return os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("HOROVOD_RANK", "0")


def hang(how: str) -> None:
    """Never return: ``data`` waits as a reader does, ``lock`` in a call that holds Python's lock.

    ``busy`` and ``idle`` are none: they compute, or wait, for a while in each step.
    """
    if how == "idle":
        time.sleep(0.05)
        return
    if how == "busy":
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        return
    if how == "data":
        time.sleep(3600)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time nobody unlocks it
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


class StoppingSource(ArraySource):
    """Samples whose reader on rank 1 is told to stop when it reads them."""

    def gather(self, indices: tf.Tensor) -> tuple[Any, Any]:
        def stop(values: np.ndarray) -> np.ndarray:
            if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
                os.kill(os.getpid(), signal.SIGUSR1)
            return values

        return super().gather(tf.ensure_shape(tf.numpy_function(stop, [indices], indices.dtype), indices.shape))


class Lasting(Workload):
    """Augmented images, dropout, a moving average of the weights: everything that a resumed run could get wrong.

    ``metrics.jsonl`` shows which samples each step trained, over all ranks (see ``read_ledger``).
    ``RINGTRAIN_TEST_STEP_SECONDS`` is the least time that the data of a step take, ``RINGTRAIN_TEST_SAVE_SECONDS`` that
    of a save, and ``RINGTRAIN_TEST_START_SECONDS`` that of the start,
    which then makes the file that ``RINGTRAIN_TEST_STARTED`` names. ``RINGTRAIN_TEST_STOP_IN_EVALUATION`` lets rank 1
    get SIGUSR1 in the middle of the first evaluation. With ``RINGTRAIN_TEST_HANG`` (see ``hang``) the rank that
    ``RINGTRAIN_TEST_HANG_RANK`` names never gets the data of step ``HANG_STEP``.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "epochs": 6,
        "global_batch_size": 7,
        "log_every": 1,
        "eval_every_epochs": 2,
        "checkpoint_every": 5,
        "optimizer": {"name": "adam", "lr": 0.01, "schedule": "exponential", "decay_epochs": 3.0, "ema": 0.99},
        "best_metric": "accuracy",
        "best_direction": "max",
    }

    def create_model(self) -> keras.Model:
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((SIDE, SIDE, 1)),
                layers.Flatten(),
                # A power of two: Keras from 3.14 on rounds such a factor to a float32, also in float64.
                layers.Dense(16, activation="relu", kernel_regularizer=keras.regularizers.L2(2**-10)),
                layers.Dropout(0.0 if keras.config.floatx() == "float64" else 0.3),
                layers.Dense(3),
            ]
        )

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        if seconds_of("START"):
            Path(os.environ["RINGTRAIN_TEST_STARTED"]).touch()
            time.sleep(seconds_of("START"))
        generator = np.random.default_rng(0)
        images = generator.random((NUM_SAMPLES + 13, SIDE, SIDE, 1)).astype(keras.config.floatx())
        labels = (images.mean(axis=(1, 2, 3)) * 30).astype(int) % 3
        evaluation = from_arrays(images[NUM_SAMPLES:], (labels[NUM_SAMPLES:], np.arange(13)))
        if os.environ.get("RINGTRAIN_TEST_STOP_IN_EVALUATION"):
            evaluation = StoppingSource(evaluation.x, evaluation.y, num_samples=13)
        return Sources(from_arrays(images[:NUM_SAMPLES], (labels[:NUM_SAMPLES], np.arange(NUM_SAMPLES))), evaluation)

    @tf.autograph.experimental.do_not_convert  # AutoGraph takes a tenth of a short run
    def augment(self, x: tf.Tensor, y: Any, keys: tf.Tensor) -> tuple[tf.Tensor, Any]:
        seconds = seconds_of("STEP")
        is_mine = os.environ.get("RINGTRAIN_TEST_HANG_RANK") == my_rank()
        how = os.environ.get("RINGTRAIN_TEST_HANG") if is_mine else None
        steps = itertools.count(1)

        def wait(images: np.ndarray) -> np.ndarray:
            time.sleep(seconds)
            if how and (how in ("busy", "idle") or next(steps) == HANG_STEP):
                hang(how)
            return images

        shifted = random_shift(x, keys, max_pixels=1)
        waits = seconds or how
        return (tf.ensure_shape(tf.numpy_function(wait, [shifted], x.dtype), x.shape) if waits else shifted), y

    def loss(self, y: Any, outputs: tf.Tensor) -> tf.Tensor:
        return keras.losses.sparse_categorical_crossentropy(y[0], outputs, from_logits=True)

    def metrics(self, y: Any, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        ledger = tf.one_hot(y[1] // SAMPLES_PER_METRIC, NUM_LEDGER_METRICS, dtype=keras.config.floatx())
        ledger *= tf.cast(COUNT_BASE ** (y[1] % SAMPLES_PER_METRIC), ledger.dtype)[:, tf.newaxis]  # [n, metrics]
        return {
            "accuracy": keras.metrics.sparse_categorical_accuracy(y[0], outputs),
            **{f"samples_{number}": column for number, column in enumerate(tf.unstack(ledger, axis=1))},
        }

    def summaries(self, model: keras.Model, x: tf.Tensor, y: Any) -> dict[str, Images | Histogram]:
        return {"input": Images(x), "weights": Histogram(model.trainable_variables[0].value)}
