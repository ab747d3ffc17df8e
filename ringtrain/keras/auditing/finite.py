"""Values of an audited step that are not finite, with which nothing can be compared."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ringtrain.messages.rules import list_first

MAX_NAMED = 3
REMEDY_OF_SAMPLES = "Mend or leave out such samples"
PARTS_OF_DATA = ("x", "y", "sample_weight")  # of a batch of ``fit``


class Origin(enum.IntEnum):
    """Where values that are not finite come up first. Later ones follow from earlier ones, on all ranks."""

    SAMPLES = 0
    FIRST_SAMPLES = 1
    WEIGHTS = 2
    GRADIENTS = 3
    REDUCED = 4


class NotFinite(NamedTuple):
    origin: int
    words: str  # without a full stop


def describe_nonfinite_samples(arguments: Any) -> str:
    """Return which tensors among the arguments of a step are not finite, in words; empty if none.

    Args:
        arguments: positional ones as a tuple, and those by name as a dict.
    """
    found = []
    for name, leaf in named_leaves(arguments):
        number, first = count_nonfinite(leaf)
        if number:
            kind = f"{leaf.dtype.name if hasattr(leaf.dtype, 'name') else leaf.dtype} {list(leaf.shape)}"
            words = f"{number:,} of {int(np.prod(leaf.shape)):,} values of {name}, {kind}"
            found.append(f"{words}, the first in its sample {first}")
    return list_first(found, MAX_NAMED)


def named_leaves(arguments: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a step's arguments with names such as ``x``, ``y[0]`` or ``argument 1``."""
    args, _ = arguments
    is_pair = len(args) == 1 and isinstance(args[0], tuple) and len(args[0]) <= len(PARTS_OF_DATA)
    for path, leaf in keras.tree.flatten_with_path(arguments):
        if not isinstance(leaf, tf.Tensor | np.ndarray) or not leaf.ndim:
            continue
        is_named, *rest = path
        if is_named:
            name, *inner = rest
        elif is_pair:
            _, part, *inner = rest
            name = PARTS_OF_DATA[part]
        else:
            position, *inner = rest
            name = f"argument {position}"
        yield name + "".join(f"[{part!r}]" for part in inner), leaf


def count_nonfinite(value: Any) -> tuple[int, int]:
    """Return how many numbers of an array are NaN or infinite, and the row of the first one."""
    array = np.asarray(value)
    if not tf.as_dtype(array.dtype).is_floating and not np.iscomplexobj(array):
        return 0, 0
    are_wrong = ~np.isfinite(array)
    number = int(np.count_nonzero(are_wrong))
    return number, int(np.argwhere(are_wrong)[0][0]) if number and array.ndim else 0


def name_nonfinite(values: Mapping[Any, Any], variables: Mapping[Any, Any]) -> str:
    """Return the paths of the variables whose values are not finite; empty if all are."""
    wrong = [
        getattr(variables[key], "path", variables[key].name)
        for key, value in values.items()
        if key in variables and count_nonfinite(value)[0]
    ]
    return list_first(wrong, MAX_NAMED)


def find_nonfinite(
    samples: Sequence[str], first_samples: str, weights: str, gradients: str, reduced: str, scale: float
) -> NotFinite | None:
    """Return the first cause of values of a rank's step that are not finite; None if all are finite.

    Args:
        samples: of each batch of the step, what is not finite, in words.
        first_samples: the same of the batches of earlier calls, which are not compared.
        weights: names of variables that are not finite before the step.
        gradients: names of variables whose gradients are not, before their reduction.
        reduced: the same after their reduction.
        scale: of the loss; 1 if there is none.
    """
    wrong_samples = next(filter(None, samples), "")
    if wrong_samples and (weights or gradients or reduced):  # a model may mask them
        return NotFinite(
            Origin.SAMPLES, f"the batch is not finite (NaN or infinite): {wrong_samples}. {REMEDY_OF_SAMPLES}"
        )
    if first_samples and weights:
        return NotFinite(
            Origin.FIRST_SAMPLES,
            f"an earlier batch was not finite (NaN or infinite): {first_samples}. {REMEDY_OF_SAMPLES}",
        )
    if weights:
        return NotFinite(
            Origin.WEIGHTS,
            f"{weights} is not finite (NaN or infinite) before the step, although all batches were. Look at the "
            "first weights, or lower the learning rate",
        )
    if gradients and scale > 1:
        return NotFinite(
            Origin.GRADIENTS,
            f"the gradient of {gradients} is not finite, although batch and weights are: the loss times its scale of "
            f"{scale:g} may be too large for float16. Start with a smaller one: "
            "keras.optimizers.LossScaleOptimizer(..., initial_scale=1024.0)",
        )
    if gradients:
        return NotFinite(
            Origin.GRADIENTS,
            f"the gradient of {gradients} is not finite (NaN or infinite), although batch and weights are: the model "
            "or the loss divides by zero, takes the logarithm of zero, or overflows",
        )
    if reduced:
        return NotFinite(
            Origin.REDUCED,
            f"the reduced gradient of {reduced} is not finite, although this rank's own is: the sum overflows, such "
            "as in float16",
        )
    return None
