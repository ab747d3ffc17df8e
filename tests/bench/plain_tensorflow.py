"""A plain TensorFlow training loop without any communication: the bound that data-parallel training is held against.

Usage: python -m tests.bench.plain_tensorflow CORE STEPS WARM_UP_STEPS; prints examples per second and the last loss.
"""

from __future__ import annotations

import os
import sys
import time


def main(core: int, steps: int, warm_up_steps: int) -> None:
    os.sched_setaffinity(0, {core})
    import keras
    import tensorflow as tf

    from tests.bench.tutorial_cnn import NUM_IMAGES, create_model, make_images

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    model, optimizer = create_model(), keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    # Numbers are shuffled, not images: filling a buffer with images anew in each epoch would slow the bound down.
    all_images, all_labels = (tf.constant(values) for values in make_images())
    order = tf.data.Dataset.range(NUM_IMAGES).shuffle(NUM_IMAGES).repeat().batch(128)
    data = order.map(lambda n: (tf.gather(all_images, n), tf.gather(all_labels, n))).prefetch(2)

    @tf.function(jit_compile=False)
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
            loss = tf.reduce_mean(losses)
        variables = [variable.value for variable in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)
        return loss

    start = 0.0
    for step, (images, labels) in enumerate(data.take(steps)):
        if step == warm_up_steps:
            start = time.perf_counter()
        loss = train_step(images, labels)
    seconds = time.perf_counter() - start
    print(128 * (steps - warm_up_steps) / seconds, float(loss))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
