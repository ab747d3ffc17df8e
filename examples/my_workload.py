# my_workload.py: a model, its data and its loss. Every rank runs all of it.
import keras
import numpy as np
from ringtrain import Sources, Workload, from_arrays


class Moons(Workload):
    # Any setting of `python -m ringtrain train --help`; flags win. batch_size is each rank's.
    defaults = {"epochs": 20, "batch_size": 16, "optimizer": {"name": "adam", "lr": 0.01}}
    # Settings of your own: --options.width 64
    options = {"width": 32}

    def create_model(self):  # a built Keras model, of any kind
        width = self.options["width"]
        return keras.Sequential(
            [
                keras.Input((2,)),
                keras.layers.Dense(width, activation="relu"),
                keras.layers.Dense(width, activation="relu"),
                keras.layers.Dense(2),
            ]
        )

    def create_sources(self, data_dir, *, synthetic):  # all samples, the same on every rank: each trains its share
        angle = np.random.default_rng(0).uniform(0, np.pi, 1000)
        label = np.arange(1000) % 2
        x = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        x = np.where(label[:, None] == 1, [1.0, 0.3] - x, x).astype(np.float32)
        return Sources(train=from_arrays(x[:800], label[:800]), evaluation=from_arrays(x[800:], label[800:]))

    def loss(self, y, outputs):  # one value for each sample; their mean over the global batch is trained
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)

    def metrics(self, y, outputs):  # one value for each sample as well; the log shows the means
        return {"accuracy": keras.metrics.sparse_categorical_accuracy(y, outputs)}

    # Also: augment, summaries (TensorBoard), create_optimizer. ringtrain/workloads/base.py says what each gives.
