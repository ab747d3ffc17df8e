# fit_digits.py: horovodrun -np 2 python fit_digits.py
import keras
import tensorflow as tf

import ringtrain.keras as hvd  # the one line: it was "import horovod.tensorflow.keras as hvd"
from ringtrain.workloads.digits import load_digits

hvd.init()
images, labels = load_digits()  # handwritten digits, 8x8; read MNIST in the same way
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shard(hvd.size(), hvd.rank())
dataset = dataset.repeat().shuffle(2000).batch(64)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Dropout(0.25),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
learning_rate = 0.001 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=learning_rate, warmup_epochs=3),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.keras"))
model.fit(dataset, steps_per_epoch=60 // hvd.size(), epochs=10, callbacks=callbacks, verbose=0)
print(f"{hvd.rank()} {model.evaluate(images, labels, verbose=0)}\n", end="")  # the same on every rank
