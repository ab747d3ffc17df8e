"""Variables that must be equal on all ranks: names in checkpoints, and broadcast."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ringtrain.collectives import Collective
from ringtrain.errors import UsageError
from ringtrain.messages.rules import list_first
from ringtrain.runtime.private import momentums_of, weights_of_optimizer

BROADCAST_BYTES = 64 * 2**20
UNNAMED = re.compile(r"variable(_\d+)?")


def is_seed_state(variable: keras.Variable) -> bool:
    """True for dropout's seed generators: a broadcast would make all masks equal."""
    return variable.name == "seed_generator_state"


def require_gradients_that_add(variables: Sequence[keras.Variable]) -> None:
    """Refuse Keras' float8 "gradients", which are new values and cannot be summed."""
    names = [v.path for v in variables if getattr(v, "overwrite_with_gradient", False)]
    if names:
        raise UsageError(
            f"the variable {list_first(names)} of Keras' float8 training takes what backpropagation gives for it as "
            "its new value, which cannot be summed over ranks. Train without float8, such as in mixed_bfloat16."
        )


def named_weights(model: keras.Model) -> list[tuple[str, keras.Variable]]:
    """Named by path, such as ``digits/conv2d/kernel``; with moving statistics."""
    return [(v.path, v) for v in model.variables if not is_seed_state(v)]


def named_slots(optimizer: keras.optimizers.Optimizer) -> list[tuple[str, keras.Variable]]:
    """Named without the optimizer, whose name differs between Keras versions: ``digits_conv2d_kernel_momentum``."""
    variables = optimizer.variables
    return list(zip(without_optimizer_names([v.path for v in variables]), variables, strict=True))


def without_optimizer_names(paths: Sequence[str]) -> list[str]:
    """Remove the optimizer's name, which Keras chooses: the prefix of the variable ``iteration``.

    Wrappers list inner optimizers' names too. Unnamed variables (one of Nadam's) lose Keras' process-wide number.
    """
    prefixes = {path.removesuffix("iteration") for path in paths if path.endswith("/iteration")}
    names = [path.removeprefix(max((p for p in prefixes if path.startswith(p)), key=len, default="")) for path in paths]
    return ["variable" if UNNAMED.fullmatch(name) else name for name in names]


def slots_that_begin_as_weights(optimizer: Any) -> list[tuple[keras.Variable, keras.Variable]]:
    """Pairs (weight, slot)."""
    schedule_free = getattr(keras.optimizers, "ScheduleFreeAdamW", ())  # since Keras 3.14
    parts = [part for part in (optimizer, *getattr(optimizer, "optimizers", ())) if isinstance(part, schedule_free)]
    return [pair for part in parts for pair in zip(weights_of_optimizer(part), momentums_of(part), strict=True)]


def name_variables(**kinds: Sequence[tuple[str, keras.Variable]]) -> dict[str, keras.Variable]:
    """Named by kind and path, such as ``weights/digits/conv2d/kernel``."""
    items = [(f"{kind}/{path}", variable) for kind, variables in kinds.items() for path, variable in variables]
    names = number_twins([name for name, _ in items])  # two layers with one name
    return {name: variable for name, (_, variable) in zip(names, items, strict=True)}


def number_twins(names: Sequence[str]) -> list[str]:
    """Append ``#2``, ``#3`` and so on to duplicates."""
    numbered: dict[str, None] = {}
    for name in names:
        twins = (name if number == 1 else f"{name}#{number}" for number in itertools.count(1))
        numbered[next(twin for twin in twins if twin not in numbered)] = None
    return list(numbered)


def describe_difference(expected: Sequence[str], found: Sequence[str]) -> str:
    missing = [name for name in expected if name not in set(found)]
    extra = [name for name in found if name not in set(expected)]
    titled = (("missing", missing), ("not in the model", extra))
    return "; ".join(f"{title}: {list_first(names, 5)}" for title, names in titled if names)


def broadcast_variables(variables: Sequence[keras.Variable], collective: Collective) -> None:
    """Broadcast from rank 0, several per message. Collective."""
    for number, group in enumerate(plan_messages(variables)):
        flat = tf.concat([tf.reshape(variable.value, [-1]) for variable in group], axis=0)
        is_sent_as_bytes = flat.dtype in (tf.bfloat16, tf.uint32, tf.uint64)  # unsupported by Horovod
        [first] = collective.broadcast(
            [tf.bitcast(flat, tf.uint8) if is_sent_as_bytes else flat], name=f"first_values/{number}"
        )
        if is_sent_as_bytes:
            first = tf.bitcast(first, flat.dtype)
        sizes = [math.prod(variable.shape) for variable in group]
        for variable, values in zip(group, tf.split(first, sizes), strict=True):
            variable.assign(tf.reshape(values, variable.shape))


def plan_messages(variables: Sequence[keras.Variable]) -> list[list[keras.Variable]]:
    """Group by dtype, at most BROADCAST_BYTES unless one variable is larger."""
    messages: list[list[keras.Variable]] = []
    open_messages: dict[str, tuple[list[keras.Variable], int]] = {}
    for variable in variables:
        num_bytes = math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
        message, filled = open_messages.get(variable.dtype, ([], 0))
        if not message or filled + num_bytes > BROADCAST_BYTES:
            message, filled = [], 0
            messages.append(message)
        message.append(variable)
        open_messages[variable.dtype] = (message, filled + num_bytes)
    return messages
