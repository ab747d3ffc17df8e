"""One worker of a custom training loop on tf.distribute's MultiWorkerMirroredStrategy; TF_CONFIG names the workers.

TF_CONFIG=... python tf_distribute.py --rank 0 --model CNN --size 2 --steps 300 ... --output DIR
"""

from __future__ import annotations

from typing import Any

import peer_loop
import peer_models


def main() -> None:
    arguments = peer_loop.parse_arguments(__doc__)
    peer_loop.pin(arguments, arguments.rank)
    import tensorflow as tf

    peer_loop.set_threads(arguments)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    spec = peer_models.MODELS[arguments.model]
    global_batch_size = spec.local_batch_size * arguments.size
    with strategy.scope():
        model, optimizer = spec.create(), peer_models.create_optimizer(spec)
        optimizer.build(model.trainable_variables)

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=global_batch_size)
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)  # Keras sums over the replicas
        return loss

    @tf.function(jit_compile=False)
    def train_step(x: Any, y: Any) -> Any:
        return strategy.run(replica_step, args=(x, y))

    batches = strategy.distribute_datasets_from_function(lambda _: peer_loop.make_batches(arguments, arguments.rank))
    sec_per_step, loss = peer_loop.time_steps(train_step, batches, arguments, is_rank0=arguments.rank == 0)
    mean_loss = float(strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None))
    if arguments.rank == 0:
        peer_loop.write_results(arguments, sec_per_step, mean_loss, model)


if __name__ == "__main__":
    main()
