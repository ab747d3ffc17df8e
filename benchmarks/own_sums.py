"""ringtrain's own collective for what leaves at once, by sizes: a rank of ``benchmarks allreduce``.

horovodrun -np 2 python -m benchmarks.own_sums --sizes 4096,65536 --output DIR --how function

``--how`` is ``function``: compiled, with read-only sums, as in the training step; ``copied``: sums in the rank's own
memory; ``eager``; ``mpi``: compiled, by MPI alone; or ``nothing``: without a sum.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from benchmarks.peers import peer_sums
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

    how = arguments.how
    joined = connect("native" if how == "mpi" else config.backend, world)
    collective = joined if how == "mpi" else with_native_sums(joined)

    def prepare(values: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        tensor = tf.Variable(values)
        options = {"name": f"sum_{len(values)}", "read_only": how == "function"}

        def add() -> Any:
            mine = [tensor.read_value()]
            return tf.identity(mine[0]) if how == "nothing" else collective.sum_in_order(mine, **options).tensors[0]

        compiled = tf.function(add, jit_compile=False)
        return (add if how == "eager" else compiled), lambda total: total.numpy()

    peer_sums.time_sums(arguments, world.rank, world.size, prepare, adds=how != "nothing")
    collective.close()


if __name__ == "__main__":
    main()
