# features.py: horovodrun -np 2 python -m ringtrain --workload features.py --data_dir .
import glob

import keras
import tensorflow as tf
from ringtrain import Sources, Workload, from_arrays, from_dataset

FEATURES = {"x": tf.io.FixedLenFeature([64], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}


def parse(record):
    values = tf.io.parse_single_example(record, FEATURES)
    return values["x"], values["y"]


def read(pattern, num_samples):  # samples, not batches, with their number, which files do not contain
    samples = tf.data.TFRecordDataset(sorted(glob.glob(pattern))).map(parse)
    return samples.apply(tf.data.experimental.assert_cardinality(num_samples))


class Features(Workload):
    defaults = {"epochs": 5, "optimizer": {"name": "adam", "lr": 0.01}}

    def create_model(self):
        return keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])

    def create_sources(self, data_dir, *, synthetic):
        x, y = read(f"{data_dir}/test-*.tfrecord", 300).batch(300).get_single_element()
        train = read(f"{data_dir}/train-*.tfrecord", 1497).shuffle(1497)
        return Sources(train=from_dataset(train), evaluation=from_arrays(x, y))

    def loss(self, y, outputs):
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)


if __name__ == "__main__":  # python features.py writes the files
    from ringtrain.workloads.digits import load_digits

    def write(name, images, labels):
        with tf.io.TFRecordWriter(name) as file:
            for image, label in zip(images, labels, strict=True):
                x = tf.train.Feature(float_list=tf.train.FloatList(value=image.ravel() / 16))
                y = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
                example = tf.train.Example(features=tf.train.Features(feature={"x": x, "y": y}))
                file.write(example.SerializeToString())

    images, labels = load_digits()
    write("train-0.tfrecord", images[:1497], labels[:1497])
    write("test-0.tfrecord", images[1497:], labels[1497:])
