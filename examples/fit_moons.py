# fit_moons.py: horovodrun -np 2 python fit_moons.py
import keras
import numpy as np

import ringtrain.keras as hvd

hvd.init()  # gives each rank its own GPU or cores
angle = np.random.default_rng(0).uniform(0, np.pi, 1000)
label = np.arange(1000) % 2
x = np.stack([np.cos(angle), np.sin(angle)], axis=1)
x = np.where(label[:, None] == 1, [1.0, 0.3] - x, x).astype(np.float32)
mine = slice(hvd.rank() * 1000 // hvd.size(), (hvd.rank() + 1) * 1000 // hvd.size())

model = keras.Sequential(
    [
        keras.Input((2,)),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(2),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss, metrics=["accuracy"])
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
model.fit(x[mine], label[mine], batch_size=16, epochs=10, callbacks=callbacks, verbose=0)
print(f"{hvd.rank()} {model.evaluate(x, label, verbose=0)}\n", end="")  # the same on every rank
