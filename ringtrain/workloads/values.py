"""What a workload makes of a batch: each sample's loss and metrics, from the model's outputs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringtrain.errors import UsageError
from ringtrain.workloads.base import Workload


def per_sample(workload: Workload, y: Any, outputs: Any) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """The losses [n] and the metrics, [n] each, of n samples.

    Args:
        y: its floats are made float64 where the outputs are, as in ``verify``: TensorFlow mixes no types.
        outputs: the model's; those of half precision are made float32 first, since a loss needs its range.

    Raises:
        UsageError: the workload gives something else than one value for each sample.
    """
    outputs = tf.nest.map_structure(_at_least_float32, outputs)
    if any(tensor.dtype == tf.float64 for tensor in tf.nest.flatten(outputs)):
        y = tf.nest.map_structure(_float64_if_float, y)
    losses, metrics = workload.loss(y, outputs), workload.metrics(y, outputs)
    for name, value in {"loss": losses, **metrics}.items():
        if value.shape.rank != 1:
            raise UsageError(
                f"{type(workload).__name__} gives {name!r} the shape {value.shape}, but each sample needs one value: "
                "[n]. Take the mean over the other dimensions.",
                reach="run",
            )
    return losses, metrics


def _at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor


def _float64_if_float(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.float64) if tensor.dtype.is_floating else tensor
