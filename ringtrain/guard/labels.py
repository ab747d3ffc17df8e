"""Labels outside the model's classes: on some devices, a sparse cross-entropy silently gives NaN or 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.data.augment import graph_code
from ringtrain.data.pipeline import Augment, Batch
from ringtrain.data.sources import ArraySource
from ringtrain.errors import DataError

CHECKED_STEPS = 100  # of a process; a check takes microseconds
SPARSE_LOSS = "SparseSoftmaxCrossEntropyWithLogits"  # used by Keras' and TensorFlow's sparse cross-entropies
KEEP_VALUES = ("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze")


@dataclass(frozen=True, order=True)
class Labels:
    """A part of y, by position in ``tf.nest.flatten(y)``."""

    place: int
    num_classes: int

    def check(self, y: Any, indices: Any, *, of: str) -> None:
        """Raise DataError for invalid labels; ``indices`` [n] are of the samples in ``y``."""
        tensor = tf.nest.flatten(y)[self.place]
        labels = np.asarray(tensor)
        if not labels.size:
            return
        self._require_numbers(labels, tf.as_dtype(tensor.dtype), indices, of=of)
        is_whole = labels.dtype.kind in "biu"
        is_in_range = labels.min() >= 0 and labels.max() < self.num_classes
        if is_whole and is_in_range:
            return
        first = _first_of(~((labels >= 0) & (labels < self.num_classes)))  # NaN too
        if first is not None:
            raise DataError(
                f"sample {int(indices[first[0]])} of the {of} data has the label {labels[first]}, but the model gives "
                f"{self._rule}. Look at the labels, give the model's last layer more units, or name one to be "
                "ignored as the loss's ignore_class."
            )
        first = _first_of(labels != np.floor(labels))
        if first is not None:
            raise DataError(
                f"sample {int(indices[first[0]])} of the {of} data has the label {labels[first]}, which is no whole "
                f"number and would be cut off, but the model gives {self._rule}. Give whole numbers, or use the "
                "loss of a regression."
            )

    @property
    def _rule(self) -> str:
        return (
            f"{self.num_classes} classes: the loss, a sparse cross-entropy, takes labels from 0 to "
            f"{self.num_classes - 1}"
        )

    def _require_numbers(self, labels: np.ndarray, dtype: tf.DType, indices: Any, *, of: str) -> None:
        """Raise DataError for texts and complex numbers; truth values are 0 and 1."""
        if not (dtype == tf.string or dtype.is_complex):
            return
        kind = "texts" if dtype == tf.string else "complex numbers"
        example = labels.reshape(-1)[0]
        shown = example.decode(errors="replace") if isinstance(example, bytes) else example
        raise DataError(
            f"the labels of the {of} data are {kind} (type {dtype.name}), such as {str(shown)[:40]!r} of sample "
            f"{int(indices[0])}, but the model gives {self._rule}. Number the classes: "
            "names, labels = np.unique(labels, return_inverse=True)."
        )


def _first_of(are_wrong: np.ndarray) -> tuple[int, ...] | None:
    """Return the first place that is true."""
    places = np.argwhere(are_wrong)
    return tuple(places[0]) if len(places) else None


def find_labels(function: Any, batch_spec: Batch) -> Sequence[Labels]:
    """Find parts of y that reach a sparse cross-entropy unmodified."""
    first = len(tf.nest.flatten(batch_spec.x))
    return find_labels_of(function.graph, function.graph.inputs[first : first + len(tf.nest.flatten(batch_spec.y))])


def find_labels_of(graph: Any, y: Sequence[tf.Tensor]) -> Sequence[Labels]:
    """``y`` are inputs of the graph."""
    inputs = {tensor.ref(): place for place, tensor in enumerate(y)}
    found = set()
    for operation in graph.get_operations():
        if operation.type != SPARSE_LOSS:
            continue
        logits, labels = operation.inputs
        while labels.ref() not in inputs and labels.op.type in KEEP_VALUES:
            labels = labels.op.inputs[0]
        if labels.ref() in inputs and logits.shape[-1] is not None:
            found.add(Labels(inputs[labels.ref()], logits.shape[-1]))
    return sorted(found)


def keeps_labels(augment: Augment, source: ArraySource) -> bool:
    kept: list[bool] = []

    def trace(indices: tf.Tensor, keys: tf.Tensor) -> None:
        x, y = source.gather(indices)
        changed = graph_code(augment)(x, y, keys)[1]
        kept.extend(a is b for a, b in zip(tf.nest.flatten(y), tf.nest.flatten(changed), strict=True))

    tf.function(trace, autograph=False).get_concrete_function(
        tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.uint64)
    )
    return all(kept)
