"""ringtrain's own collective for what leaves at once, by sizes: a rank of ``bench allreduce``.

horovodrun -np 2 python -m ringtrain.bench.own_sums --sizes 4096,65536 --output DIR
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ringtrain.bench.peers import peer_sums
from ringtrain.config import Config
from ringtrain.runtime.devices import start_tensorflow
from ringtrain.runtime.world import read_world
from ringtrain.training.joining import pin


def main() -> None:
    arguments = peer_sums.parse_arguments(__doc__)
    config = Config()
    world = read_world(os.environ)
    plan = pin(world, config)
    start_tensorflow(plan, world)
    import tensorflow as tf

    from ringtrain.collectives import connect, with_native_sums

    collective = with_native_sums(connect(config.backend, world))

    def prepare(values: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        tensor = tf.Variable(values)

        @tf.function(jit_compile=False)
        def add() -> Any:
            return collective.all_reduce([tensor.read_value()], name=f"sum_{len(values)}", ordered=True).tensors[0]

        return add, lambda total: total.numpy()

    peer_sums.time_sums(arguments, world.rank, world.size, prepare)
    collective.close()


if __name__ == "__main__":
    main()
