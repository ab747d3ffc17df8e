"""Trace a step as a graph: audited steps run eagerly, and a graph may refuse what eager code takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ringtrain.keras.fit_state import trace_train_step
from ringtrain.keras.guards import first_batches


def trace_audited_step(train_step: Callable[[Any], Any], data: Any) -> None:
    """Trace ``train_step`` of a model as ``fit`` does, without AutoGraph.

    Args:
        train_step: a bound method.
        data: a batch. Dimensions that differ between batches are unknown in the graph.
    """
    batch = tf.nest.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), data)
    trace_train_step(train_step, find_spec(batch, first_batches().batch_spec))


def find_spec(batch: Any, batch_spec: Any) -> Any:
    """Return the types and shapes of the batches of a ``fit`` if they suit this batch, and the batch otherwise."""
    try:
        tf.nest.assert_same_structure(batch_spec, batch)
    except (TypeError, ValueError):
        return batch
    specs = tf.nest.flatten(batch_spec)
    tensors = tf.nest.flatten(batch)
    for spec, tensor in zip(specs, tensors, strict=True):
        if not (isinstance(spec, tf.TensorSpec) and spec.is_compatible_with(tensor)):
            return batch
    return batch_spec


def why_not_traced(trace: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the first line of the error with which ``trace`` fails; nothing if it does not."""
    try:
        trace(*args, **kwargs)
    except Exception as error:  # of the script
        lines = str(error).strip().splitlines() or [""]
        reason = lines[-1] if lines[0].startswith("in user code") else lines[0]
        return f"{type(error).__name__}: {reason.strip()}"
    return ""
