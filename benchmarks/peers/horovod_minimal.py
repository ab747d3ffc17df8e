"""A training loop as Horovod's documentation for TensorFlow 2 writes it, and no more.

horovodrun -np 2 python horovod_minimal.py --model CNN --size 2 --steps 300 ... --output DIR
"""

from __future__ import annotations

import os

import peer_loop
import peer_models


def main() -> None:
    arguments = peer_loop.parse_arguments(__doc__)
    local_rank = os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", os.environ.get("HOROVOD_LOCAL_RANK", "0"))
    peer_loop.pin(arguments, int(local_rank))
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    peer_loop.set_threads(arguments)
    spec = peer_models.MODELS[arguments.model]
    model, optimizer = spec.create(), peer_models.create_optimizer(spec)
    variables = [variable.value for variable in model.trainable_variables]
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=False)
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        tape = hvd.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)
        return loss

    hvd.broadcast_variables(variables, root_rank=0)
    batches = peer_loop.make_batches(arguments, hvd.rank())
    sec_per_step, loss = peer_loop.time_steps(train_step, batches, arguments, is_rank0=hvd.rank() == 0)
    mean_loss = float(hvd.allreduce(loss, op=hvd.Average, name="mean_loss"))
    if hvd.rank() == 0:
        peer_loop.write_results(arguments, sec_per_step, mean_loss, model)
    hvd.shutdown()


if __name__ == "__main__":
    main()
