"""The variables and optimizers that a model and its callbacks hold in attributes, lists, dicts and nested models.

Keras lists a model's weights, metrics and compiled optimizer. A training changes others too: the second optimizer of a
GAN, the state of a stateful RNN, a ``tf.Variable`` that counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

# Objects whose attributes are searched. Others, such as a dataset, may refer to anything.
SEARCHED_CLASSES = (
    keras.Layer,
    keras.Metric,
    keras.Loss,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.callbacks.Callback,
    keras.random.SeedGenerator,
    tf.Module,
)
COMPILED_OPTIMIZER = "optimizer"  # the path of ``model.optimizer``


def find_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Return all optimizers of a model by path, such as ``g_opt``; first the compiled one.

    An optimizer that another one contains, such as a ``LossScaleOptimizer``'s, is part of it.
    """
    optimizers: dict[str, keras.optimizers.Optimizer] = {}
    compiled = getattr(model, "optimizer", None)
    if compiled is not None:
        optimizers[COMPILED_OPTIMIZER] = compiled
    for path, value in _walk(model):
        if isinstance(value, keras.optimizers.Optimizer) and value is not compiled:
            optimizers[path] = value
    part_ids: set[int] = set()
    for optimizer in optimizers.values():
        part_ids.update(map(id, parts_of(optimizer)))
    return {path: optimizer for path, optimizer in optimizers.items() if id(optimizer) not in part_ids}


def parts_of(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers that this one contains."""
    inner = getattr(optimizer, "inner_optimizer", None)
    direct_parts = list(getattr(optimizer, "optimizers", ()))
    if inner is not None:
        direct_parts.append(inner)
    parts = []
    for part in direct_parts:
        parts.append(part)
        parts += parts_of(part)
    return parts


def find_variables(owner: Any) -> dict[str, keras.Variable | tf.Variable]:
    """Return the variables that an object holds, by path, such as ``_layers/0/states/0``; each of them once."""
    variables: dict[str, keras.Variable | tf.Variable] = {}
    for path, value in _walk(owner):
        if isinstance(value, keras.Variable | tf.Variable):
            variables[path] = value
        elif isinstance(value, tf.random.Generator):
            variables[path] = value.state
    return variables


def variable_id(variable: keras.Variable | tf.Variable) -> int:
    """Return the same number for a Keras variable and its TensorFlow variable."""
    if isinstance(variable, keras.Variable):
        return id(variable.value)
    return id(variable)


def _walk(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, object) of all that is reachable from an object, each once and breadth first."""
    waiting: list[tuple[str, Any]] = [("", owner)]
    seen: set[int] = set()
    keep_alive = []  # ids are unique only among living objects
    while waiting:
        following: list[tuple[str, Any]] = []
        for path, value in waiting:
            if id(value) in seen:
                continue
            seen.add(id(value))
            keep_alive.append(value)
            yield path, value
            for name, child in _children(value):
                following.append((f"{path}/{name}" if path else name, child))
        waiting = following


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.Variable | tf.Variable | tf.random.Generator):
        return
    if isinstance(value, dict):
        for key, child in value.items():
            yield str(key), child
    elif isinstance(value, list | tuple | set | frozenset):
        for number, child in enumerate(value):
            yield str(number), child
    elif isinstance(value, SEARCHED_CLASSES):
        for name, child in vars(value).items():
            yield name, child
