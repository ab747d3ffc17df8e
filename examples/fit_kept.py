# fit_kept.py: horovodrun -np 2 python fit_kept.py
import keras
import numpy as np
import tensorflow as tf

import ringtrain.keras as hvd

hvd.init()
keras.utils.set_random_seed(1 + hvd.rank())
random = np.random.default_rng(0)  # the same samples on every rank, of which each takes its share
x = random.normal(size=(4096, 2)).astype(np.float32)
y = (x[:, 0] * x[:, 1] > 0).astype(np.int32)
batches = tf.data.Dataset.from_tensor_slices((x, y)).shard(hvd.size(), hvd.rank()).shuffle(1024, seed=1).batch(32)

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss, metrics=["accuracy"])
model.fit(batches, epochs=10, validation_data=(x, y), verbose=0, callbacks=[hvd.callbacks.Run("runs/kept")])
if hvd.rank() == 0:
    print(model.evaluate(x, y, verbose=0, return_dict=True))
