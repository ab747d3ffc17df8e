"""Give every rank the variables of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras

from ringtrain.keras.collective import require_init, unique_name


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
    """
    require_init("broadcast_variables")
    plain = [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]
    name = unique_name("broadcast_variables")
    # Ranks meet by position, not by the variables' names, which Keras numbers in the order of creation.
    for number, variable in enumerate(plain):
        value = hvd.broadcast(
            variable, root_rank, name=f"{name}_{number}", ignore_name_scope=True, process_set=process_set
        )
        variable.assign(value)
