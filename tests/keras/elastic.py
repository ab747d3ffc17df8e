"""Trains elastically until there is a file, and says at each beginning and at the end where it stands.

horovodrun ... python elastic.py DIRECTORY
"""

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ringtrain.keras as hvd

STEPS, MAX_EPOCHS = 7, 2000
DIRECTORY = Path(sys.argv[1])


class Watch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if hvd.rank() == 0:
            (DIRECTORY / f"size-{hvd.size()}").touch()
        time.sleep(0.02)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if hvd.broadcast_object((DIRECTORY / "end").exists()):
            self.model.stop_training = True


def describe(state: Any) -> str:
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in [*model.weights, *model.optimizer.variables]))
    iterations = int(model.optimizer.iterations.numpy())
    return f"rank {hvd.rank()} of {hvd.size()}: {state.epoch} {state.batch} {iterations} {digest.hexdigest()}"


hvd.init()
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4), keras.layers.Dropout(0.1), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), backward_passes_per_step=2), "mse")
generator = np.random.default_rng(1)
batches = tf.data.Dataset.from_tensor_slices((generator.normal(size=(56, 3)), generator.normal(size=56)))


@hvd.elastic.run
def train(state: Any) -> None:
    print("begins as", describe(state), flush=True)
    callbacks = [
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        Watch(),
    ]
    model.fit(  # on data that end with the epoch
        batches.batch(8),
        steps_per_epoch=STEPS,
        initial_epoch=state.epoch,
        epochs=MAX_EPOCHS,
        verbose=0,
        callbacks=callbacks,
    )


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
train(state)
print("ends as", describe(state), flush=True)
