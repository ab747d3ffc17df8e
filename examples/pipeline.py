# pipeline.py: horovodrun -np 2 python -m ringtrain --workload pipeline.py
import keras
import tensorflow as tf
from ringtrain import Pass, Sources, Workload, from_dataset


class Pipeline(Workload):
    defaults = {"epochs": 20, "optimizer": {"name": "adam", "lr": 0.05}}

    def create_model(self):
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

    def create_sources(self, data_dir, *, synthetic):
        return Sources(train=from_dataset(self.read))

    def read(self, of: Pass):  # this rank's batches of a pass
        numbers = tf.data.Dataset.range(1000).shard(of.size, of.rank).shuffle(1000, seed=of.seed + of.epoch)
        x = numbers.map(lambda number: tf.reshape(tf.cast(number, tf.float32) / 500 - 1, [1]))
        return x.map(lambda x: (x, 3 * x + 1)).batch(of.local_batch_size)

    def loss(self, y, outputs):
        return keras.losses.mean_squared_error(y, outputs)
