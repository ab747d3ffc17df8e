"""Horovod's all-reduce in a compiled function, or eagerly, by sizes.

horovodrun -np 2 python horovod_allreduce.py --sizes 4096,65536 --output DIR
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import peer_loop
import peer_sums


def main() -> None:
    arguments = peer_sums.parse_arguments(__doc__)
    peer_loop.pin(arguments, int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")))
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    peer_loop.set_threads(arguments)

    def prepare(values: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        tensor = tf.Variable(values)

        def add() -> tf.Tensor:
            return hvd.allreduce(tensor.read_value(), op=hvd.Sum, name=f"sum_{len(values)}")

        compiled = tf.function(add, jit_compile=False)
        return (compiled if arguments.how == "function" else add), lambda total: total.numpy()

    peer_sums.time_sums(arguments, hvd.rank(), hvd.size(), prepare)
    hvd.shutdown()


if __name__ == "__main__":
    main()
