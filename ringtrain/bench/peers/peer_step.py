"""A training step in plain TensorFlow, without any communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peer_models


def create_step(name: str) -> tuple[Any, Callable[[Any, Any], Any]]:
    """A model, and its compiled step (x, y) -> loss."""
    import keras
    import tensorflow as tf

    spec = peer_models.MODELS[name]
    model, optimizer = spec.create(), keras.optimizers.SGD(spec.learning_rate)
    variables = [variable.value for variable in model.trainable_variables]
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=False)
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)
        return loss

    return model, train_step
