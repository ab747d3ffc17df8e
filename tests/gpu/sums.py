"""What each rank of ``test_sums_of_every_size`` does: sums on its GPU, by the backend of a run."""

import os

import numpy as np

from ringtrain.runtime.devices import apply_plan, plan_devices, start_tensorflow
from ringtrain.runtime.machine import read_machine
from ringtrain.runtime.world import read_world

DTYPES = ("float16", "float32", "float64", "int32", "int64")
SIZES = [0, 1, 3, *(2**power + extra for power in range(4, 25, 2) for extra in (-1, 0, 1))]


def main() -> None:
    world = read_world(os.environ)
    plan = plan_devices(world, read_machine(os.environ), os.environ)
    apply_plan(plan)
    device = start_tensorflow(plan, world)
    import tensorflow as tf

    from ringtrain.collectives import connect

    collective = connect("horovod", world)
    for dtype in DTYPES:
        for number, size in enumerate(SIZES):
            mine = tf.cast(tf.range(size) % 7 + world.rank, dtype)
            expected = world.size * (np.arange(size) % 7) + sum(range(world.size))
            sums = collective.all_reduce([mine, mine + 1], name=f"sums/{dtype}/{number}")
            for total, right in zip(sums, (expected, expected + world.size), strict=True):
                np.testing.assert_array_equal(total.numpy(), right.astype(dtype), err_msg=f"{size} {dtype}")
    print(f"rank {world.rank} of {world.size} on {device}: {len(DTYPES) * len(SIZES)} sums are right", flush=True)
    collective.close()


if __name__ == "__main__":
    main()
