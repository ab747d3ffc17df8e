"""Give every rank the variables of one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from ringtrain.collectives import all_gather_object
from ringtrain.collectives.differentiable import unique_name
from ringtrain.errors import UsageError
from ringtrain.keras.collective import ProcessSetCollective, require_init


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: Any = hvd.global_process_set,
    inplace: bool = False,
) -> None:
    """Set variables to the root's values.

    Args:
        variables: TensorFlow's or Keras', the same and in the same order on every rank.
        root_rank: whose values count.
        process_set: the ranks that take part.
        inplace: of Horovod: whether to receive into the variables' own memory.

    Raises:
        UsageError: the ranks have other variables: their numbers, types or shapes differ.
    """
    require_init("broadcast_variables")
    plain = [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]
    name = unique_name("broadcast_variables")
    if tf.executing_eagerly():
        _require_same_kinds(plain, ProcessSetCollective(process_set=process_set))
    # Ranks meet by position, not by the variables' names, which Keras numbers in the order of creation.
    for number, variable in enumerate(plain):
        value = hvd.broadcast(
            variable, root_rank, name=f"{name}_{number}", ignore_name_scope=True, process_set=process_set
        )
        variable.assign(value)


def _require_same_kinds(variables: list[Any], collective: ProcessSetCollective) -> None:
    """Ranks with other variables would wait for each other for ever."""
    kinds = [f"{tf.as_dtype(variable.dtype).name} {list(variable.shape)}" for variable in variables]
    all_kinds = all_gather_object(collective, kinds, name="broadcast_kinds")
    for rank, others in enumerate(all_kinds):
        if others == all_kinds[0]:
            continue
        pairs = enumerate(itertools.zip_longest(all_kinds[0], others, fillvalue="nothing"))
        number, (first, other) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
        raise UsageError(
            f"rank 0 has {len(all_kinds[0])} variables to broadcast, rank {rank} has {len(others)}; they differ first "
            f"at number {number}: {first} and {other}. Create the same model and optimizer on every rank, built alike.",
            reach="run",
        )
