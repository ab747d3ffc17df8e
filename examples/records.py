# records.py: horovodrun -np 2 python -m ringtrain --workload records.py
import glob

import grain
import keras
import numpy as np
from ringtrain import Sources, Workload, from_grain


class Records(Workload):
    defaults = {"epochs": 20, "batch_size": 32, "optimizer": {"name": "adam", "lr": 0.01}}

    def create_model(self):
        return keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )

    def create_sources(self, data_dir, *, synthetic):  # no shuffle, repeat or batch: --seed, --epochs, --batch_size
        files = grain.sources.ArrayRecordDataSource(sorted(glob.glob("digits-*.array_record")))
        return Sources(train=from_grain(grain.MapDataset.source(files).map(decode)))

    def loss(self, y, outputs):
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)


def decode(record):  # a label, and 64 pixels of 0 to 16
    values = np.frombuffer(record, np.uint8)
    return values[1:].astype(np.float32) / 16, np.int64(values[0])


if __name__ == "__main__":  # python records.py writes the files
    from array_record.python.array_record_module import ArrayRecordWriter
    from ringtrain.workloads.digits import load_digits

    images, labels = load_digits()
    for part in range(2):
        writer = ArrayRecordWriter(f"digits-{part}.array_record", "group_size:1")
        for label, pixels in zip(labels[part::2], images[part::2], strict=True):
            writer.write(np.array([label, *pixels.flat], np.uint8).tobytes())
        writer.close()
