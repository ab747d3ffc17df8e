"""``model.fit`` as Horovod's documentation writes it, on Keras 2 (``tf_keras``), which its wrapper was made for.

horovodrun -np 2 python horovod_tf_keras.py --model CNN --size 2 --steps 300 ... --output DIR
"""

from __future__ import annotations

import os
import sys

import peer_loop
import peer_models


def main() -> None:
    arguments = peer_loop.parse_arguments(__doc__)
    local_rank = os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", os.environ.get("HOROVOD_LOCAL_RANK", "0"))
    peer_loop.pin(arguments, int(local_rank))
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import keras
    import tf_keras

    peer_loop.set_threads(arguments)
    spec = peer_models.MODELS[arguments.model]
    first_weights = spec.create().get_weights()  # Keras 2 initializers draw other values from the same seeds
    sys.modules["keras"] = tf_keras  # for the models and Horovod
    del keras
    import horovod.tensorflow.keras as hvd

    hvd.init()
    model = spec.create()
    model.set_weights(first_weights)
    optimizer = hvd.DistributedOptimizer(peer_models.create_optimizer(spec))
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    timer = peer_loop.make_timer(arguments, tf_keras.callbacks.Callback, is_rank0=hvd.rank() == 0)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(peer_loop.make_batches(arguments, hvd.rank()), verbose=0, callbacks=[timer, broadcast])
    mean_loss = float(hvd.allreduce(timer.last_loss, name="last_loss"))
    if hvd.rank() == 0:
        peer_loop.write_results(arguments, timer.sec_per_step, mean_loss, model)
    hvd.shutdown()


if __name__ == "__main__":
    main()
