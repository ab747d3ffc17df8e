"""Private names of Keras and TensorFlow, each with the reason why no public name does."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any


def is_decayed(optimizer: Any, variable: Any) -> bool:
    """Return True if the optimizer's weight decay applies to a weight, which need not be one that it trains.

    Keras has no public way to read what ``exclude_from_weight_decay`` has excluded.

    Args:
        optimizer: of Keras.
        variable: of Keras. Before 3.16 exclusions match the name of its TensorFlow variable, which holds its path.
    """
    if hasattr(optimizer, "_is_excluded_from_weight_decay"):  # since Keras 3.16
        return not optimizer._is_excluded_from_weight_decay(variable)
    return optimizer._use_weight_decay(variable.value)


def exclude_paths_from_decay(optimizer: Any, words: Sequence[str]) -> None:
    """Exclude weights from weight decay if their paths, such as ``model/norm/gamma``, contain one of these words.

    Since Keras 3.16 ``exclude_from_weight_decay`` compares the last part of a path only.
    """
    patterns = [re.escape(word) for word in words]
    if not hasattr(optimizer, "_is_excluded_from_weight_decay"):
        optimizer.exclude_from_weight_decay(var_names=patterns)
        return
    pattern = re.compile("|".join(patterns))
    optimizer._is_excluded_from_weight_decay = lambda variable: bool(pattern.search(variable.path))


def decay_weights_if(optimizer: Any, is_decayed_variable: Callable[[Any], bool]) -> None:
    """Replace the rule by which an optimizer decides to decay a variable; Keras' own matches names."""
    optimizer._use_weight_decay = is_decayed_variable


def skip_epochs_of_shuffle(adapter: Any, epochs: int, num_batches: int) -> None:
    """Bring the order in which Keras shuffles the batches of a ``PyDataset`` to a later epoch.

    Keras has no public way to begin ``fit`` with the order of another epoch than the first.

    Args:
        adapter: Keras' adapter of the data set.
        epochs: number of epochs before.
        num_batches: of each epoch.
    """
    if hasattr(adapter, "_epoch"):  # since Keras 3.16 the order follows from the epoch's number
        adapter._epoch += epochs
        return
    for _ in range(epochs):
        random.shuffle(list(range(num_batches)))


def build_symbolically(model: Any, batch_spec: Any) -> None:
    """Create a model's weights and the variables of its compiled metrics, without a computation.

    ``Model.build`` creates weights only, and not of a model that needs more than shapes.

    Args:
        model: compiled.
        batch_spec: ``tf.TensorSpec`` of (x,), (x, y) or (x, y, sample_weight).
    """
    model._symbolic_build(data_batch=batch_spec)


def all_layers(model: Any) -> list[Any]:
    """Return the model and all layers inside it, at any depth.

    Uses ``Layer._flatten_layers``: the public ``layers`` lists the first level only, and no layer inside a layer.
    """
    return list(model._flatten_layers())
