"""A script of a user's: a fit that is kept, with steps that take a while. fit.py OUT"""

import sys
import time
from typing import Any

import keras
import numpy as np

import ringtrain.keras as hvd


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.1)


hvd.init()
x = np.random.default_rng(hvd.rank()).normal(size=(80, 3))
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
kept = hvd.callbacks.Run(sys.argv[1], log_every=1, checkpoint_every=5)
model.fit(x, x.sum(axis=1), batch_size=4, epochs=6, verbose=0, callbacks=[Slow(), kept])
