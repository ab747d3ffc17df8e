"""A user's workload with a mistake: its augmentation knows the rank."""

import os

import tensorflow as tf

from tests.world.workloads.small import Small


class WrongByRank(Small):
    """Shifts the inputs by the number of the rank."""

    def augment(self, x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        del keys
        return x + float(os.environ.get("OMPI_COMM_WORLD_RANK", "0")), y
