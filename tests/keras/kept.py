"""A script of a user's, whose ``fit`` is kept by ``callbacks.Run``: what the tests of it start on several ranks.

python kept.py PIPELINE RUN_DIRECTORY
"""

import hashlib
import os
import sys
import time
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

import ringtrain.keras as hvd

EPOCHS, BATCHES, BATCH_SIZE, FEATURES = 3, 12, 8, 6


class Unsymbolic(keras.layers.Layer):
    """Its call needs values, so that Keras cannot build it from shapes."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x * float(x[0, 0])


def make_model(kind: str) -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            *([Unsymbolic()] if kind == "unbuilt" else [keras.Input((FEATURES,))]),
            layers.Dense(16, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """This rank's samples."""
    random = np.random.default_rng([7, hvd.rank()])
    x = random.normal(size=(BATCHES * BATCH_SIZE, FEATURES)).astype(np.float32)
    return x, (np.abs(x).sum(axis=1) * 3 % 3).astype(np.int32)


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = make_data()
        return x[index * BATCH_SIZE :][:BATCH_SIZE], y[index * BATCH_SIZE :][:BATCH_SIZE]


def generate(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches without end."""
    while True:
        for start in range(0, len(x), BATCH_SIZE):
            yield x[start:][:BATCH_SIZE], y[start:][:BATCH_SIZE]


def make_pipeline(kind: str) -> dict:
    """Arguments of ``fit``."""
    x, y = make_data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(40, seed=5).batch(BATCH_SIZE)
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH_SIZE}
    if kind == "endless":
        return {"x": dataset.repeat().prefetch(2), "steps_per_epoch": BATCHES - 1}
    if kind == "finite":  # one iterator for four epochs, and another for the fifth
        # A prefetch that tf.data adds may ask the first for more, and so draw a seed of the shuffle, before or after
        # the other is created: no two fits would be alike.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        return {"x": dataset.repeat(2).with_options(options), "steps_per_epoch": BATCHES // 2}
    if kind == "stateful":  # it cannot say where it is
        return {"x": dataset.map(lambda x, y: (x + tf.random.normal([FEATURES], stddev=0.1, seed=2), y))}
    if kind == "unknown":  # how many batches there are
        return {"x": dataset.filter(lambda x, y: True)}
    if kind == "generator":
        return {"x": generate(x, y), "steps_per_epoch": BATCHES - 1}
    if kind == "pydataset":
        return {"x": Sequence(), "shuffle": False}
    if kind == "eager":  # nor here
        of_rank_1 = int(os.environ.get("RINGTRAIN_TEST_BATCHES", BATCHES))
        return {"x": dataset.take(of_rank_1 if hvd.rank() else BATCHES).filter(lambda x, y: True)}
    if kind == "uneven":  # and nobody knows it before
        return {"x": dataset.take(BATCHES - 3 * hvd.rank()).filter(lambda x, y: True)}
    return {"x": dataset.prefetch(2)}


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        time.sleep(float(os.environ.get("RINGTRAIN_TEST_STEP_SECONDS", "0")))


class Trouble(keras.callbacks.Callback):
    """Of one rank alone, in its sixth step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 5 and self._kind == "hangs":
            time.sleep(1000)
        if batch == 5 and self._kind == "fails":
            raise ValueError("this rank alone")


def main() -> None:
    kind, out = sys.argv[1:3]
    rate = float(os.environ.get("RINGTRAIN_TEST_RATE", "0.05"))
    hvd.init()
    keras.utils.set_random_seed(11 + hvd.rank())
    model = make_model(kind)
    optimizer = keras.optimizers.Adam(rate)
    if kind != "apart":
        optimizer = hvd.DistributedOptimizer(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], run_eagerly=kind == "eager")
    x, y = make_data()
    hang_timeout = 15.0 if kind in ("hangs", "eager") else 300.0
    run = hvd.callbacks.Run(out, checkpoint_every=5, log_every=2 if kind == "nan" else 5, hang_timeout=hang_timeout)
    callbacks = [Slow(), keras.callbacks.EarlyStopping("loss", patience=50, restore_best_weights=kind == "arrays"), run]
    if kind == "twice":
        callbacks.append(hvd.callbacks.Run(f"{out}-2"))
    if hvd.rank() == 1:
        callbacks.insert(0, Trouble(kind))
    if kind == "one" and hvd.rank() == 1:
        callbacks.remove(run)
    if kind == "nan" and hvd.rank() == 1:
        x[5 * BATCH_SIZE] = np.nan
    options = {"x": x, "y": y, "batch_size": BATCH_SIZE, "shuffle": False} if kind == "nan" else make_pipeline(kind)
    history = model.fit(
        **options,
        epochs=EPOCHS + 2 if kind == "finite" else EPOCHS,
        initial_epoch=int(kind == "epoch"),
        verbose=0,
        callbacks=callbacks,
        validation_data=(x[:20], y[:20]),
        validation_batch_size=8,
    )
    values = [np.asarray(variable.numpy()) for variable in (*model.trainable_variables, *model.optimizer.variables)]
    mine = [np.asarray(variable.numpy()) for variable in model.non_trainable_variables]
    digests = [hashlib.sha256(b"".join(v.tobytes() for v in part)).hexdigest()[:16] for part in (values, mine)]
    print(f"rank {hvd.rank()}: {' '.join(digests)} after {len(history.epoch)} epochs\n", end="", flush=True)


if __name__ == "__main__":
    main()
