"""Private names of Keras and TensorFlow, each with the reason why no public name does."""

from __future__ import annotations

from typing import Any


def build_symbolically(model: Any, batch_spec: Any) -> None:
    """Create a model's weights and the variables of its compiled metrics, without a computation.

    ``Model.build`` creates weights only, and not of a model that needs more than shapes.

    Args:
        model: compiled.
        batch_spec: ``tf.TensorSpec`` of (x,), (x, y) or (x, y, sample_weight).
    """
    model._symbolic_build(data_batch=batch_spec)
