# contrastive.py: horovodrun -np 2 python -m ringtrain --workload contrastive.py
import keras
import numpy as np
import tensorflow as tf

from ringtrain import Sources, Workload, all_gather, from_arrays


class Pairs(Workload):  # two views of a thing are to be more alike than views of two things (InfoNCE)
    defaults = {"epochs": 4, "global_batch_size": 50, "optimizer": {"name": "adam", "lr": 0.01}}
    needs_every_rank = True  # the loss asks the other ranks, also those without samples

    def create_model(self):
        first, second = keras.Input((8,), name="first"), keras.Input((8,), name="second")
        encoder = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)])
        return keras.Model({"first": first, "second": second}, [encoder(first), encoder(second)])

    def create_sources(self, data_dir, *, synthetic):
        generator = np.random.default_rng(0)
        things = generator.standard_normal((1010, 8))
        views = {
            name: (things + generator.normal(0, 0.1, things.shape)).astype("float32") for name in ("first", "second")
        }
        return Sources(train=from_arrays(views, np.arange(1010)))

    def loss(self, y, outputs):
        first, second = (tf.math.l2_normalize(output, axis=1) for output in outputs)  # [n, 4]
        similarities = tf.matmul(first, all_gather(second), transpose_b=True) / 0.1  # [n, of all ranks]
        same = tf.cast(y[:, None] == all_gather(y)[None], similarities.dtype)
        return -tf.reduce_sum(same * tf.nn.log_softmax(similarities), axis=1)
