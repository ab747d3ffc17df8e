# elastic.py: horovodrun --gloo -np 2 --min-np 1 --host-discovery-script ./hosts.sh --network-interfaces lo python elastic.py
import keras
import numpy as np
import tensorflow as tf

import ringtrain.keras as hvd

hvd.init()
random = np.random.default_rng(0)
x = random.normal(size=(4096, 2)).astype(np.float32)
samples = tf.data.Dataset.from_tensor_slices((x, (x[:, 0] * x[:, 1] > 0).astype(np.int32)))
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss, metrics=["accuracy"])


@hvd.elastic.run
def train(state):
    print(f"rank {hvd.rank()} of {hvd.size()} begins at epoch {state.epoch + 1}, batch {state.batch + 1}", flush=True)
    batches = samples.shuffle(4096, seed=hvd.rank()).repeat().batch(32)
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=10),
    ]
    model.fit(batches, steps_per_epoch=64, initial_epoch=state.epoch, epochs=10, verbose=0, callbacks=callbacks)


train(hvd.elastic.KerasState(model, batch=0, epoch=0))
print(f"rank {hvd.rank()} of {hvd.size()} is done: {model.optimizer.iterations.numpy()} steps", flush=True)
