"""What a training step consists of, and what the forward and backward pass of a rank gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class StepStructure:
    """What shows when a step is traced, alike on all ranks: also one that has no samples must know it.

    Attributes:
        metric_names: of the workload, in the order of their sums.
        sparse_index_dtypes: for each trainable variable, that of the indices of its gradient; None for a dense one.
        state: the variables that the forward pass itself updates (BatchNorm's moving statistics).
    """

    metric_names: tuple[str, ...]
    sparse_index_dtypes: tuple[tf.DType | None, ...]
    state: tuple[keras.Variable, ...]


class Forward(NamedTuple):
    """What the forward and backward pass of a rank's samples gave: sums that the other ranks' are added to."""

    gradients: list[tf.Tensor | tf.IndexedSlices]
    sums: tf.Tensor  # the control vector before the reduction, [CONTROL_SUMS + metrics]
    state: list[tf.Tensor]  # new values of the structure's state
    structure: StepStructure


def trace(function: Callable[..., tuple[Any, Found]], signature: Sequence[Any]) -> tuple[Any, Found]:
    """A function of a batch and tensors, traced, and what its trace found beside them, such as a structure."""
    found = []

    def compute(*arguments: Any) -> Any:
        returned, of_trace = function(*arguments)
        found.append(of_trace)
        return returned

    traced = tf.function(compute, input_signature=signature, autograph=False).get_concrete_function()
    return traced, found[-1]
