"""State of a rank's own rows (stateful recurrent layers): checks before training, and its part of checkpoints.

Row i of such a variable belongs to sample i of the rank's batches. It is neither averaged nor broadcast.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from ringtrain.collectives import Collective, run_on_rank0
from ringtrain.data.order import SampleOrder
from ringtrain.errors import UsageError
from ringtrain.run.checkpoint import Checkpoint
from ringtrain.step.train_step import ROW_STATE, require_full_batch

PREFIX = f"{ROW_STATE}/"  # of names in a checkpoint
Arrays = dict[str, npt.NDArray]


def require_full_batches(row_state: Sequence[keras.Variable], order: SampleOrder, *, rank: int, size: int) -> None:
    """Raise UsageError, by the layer's name, if a planned batch of this rank has other than one sample for each row.

    Batches of streams are not planned; the step checks them.
    """
    if not row_state:
        return
    first = order.local_batch(0, rank=rank, size=size)
    require_full_batch(len(first.indices), row_state)
    if order.known_samples is not None:
        last = order.local_batch(order.steps_per_epoch - 1, rank=rank, size=size)
        require_full_batch(len(last.indices), row_state)


def require_same_size(path: str, former_size: int | None, size: int) -> None:
    """Raise UsageError if a run with row state, such as that at ``path``, resumes on another number of ranks.

    ``former_size`` is None for a new run.
    """
    if former_size not in (None, size):
        raise UsageError(
            f"the run was begun by {former_size} ranks, and now there are {size}: {path} holds the state of the rows "
            f"of each rank's batches, which would be other rows now. Start {former_size} ranks, or start a new run "
            "with --resume never."
        )


def gather_row_state(collective: Collective, named: Mapping[str, keras.Variable]) -> Arrays:
    """Return the rows of all ranks, in rank order, on rank 0 only. Collective."""
    rows_of_all_ranks = {}
    for name, variable in named.items():
        values = np.ascontiguousarray(variable.numpy())
        # As bytes, which all backends send for any type.
        own_bytes = tf.constant(np.frombuffer(values.tobytes(), np.uint8))
        all_bytes = collective.all_gather(own_bytes, name=name).numpy()
        if collective.world.is_rank0:
            shape = (collective.world.size * values.shape[0], *values.shape[1:])
            rows_of_all_ranks[name] = np.frombuffer(all_bytes.tobytes(), values.dtype).reshape(shape)
    return rows_of_all_ranks


def restore_row_state(
    collective: Collective, named: Mapping[str, keras.Variable], checkpoint: Checkpoint | None, *, former_size: int
) -> None:
    """Give each rank the rows that it had. Collective.

    Args:
        collective: of this run.
        named: this rank's row state.
        checkpoint: on rank 0; None on the others.
        former_size: number of ranks that wrote it.

    Raises:
        UsageError: the number of ranks differs, or the checkpoint has no such rows.
    """
    world = collective.world
    for name, variable in named.items():
        require_same_size(name.removeprefix(PREFIX), former_size, world.size)
        num_rows = variable.shape[0]
        dtype = variable.numpy().dtype
        whole_shape = (world.size * num_rows, *variable.shape[1:])
        check = functools.partial(require_saved_rows, checkpoint, name, whole_shape)
        run_on_rank0(collective, check, name=f"check/{name}")
        rows = np.zeros(whole_shape, dtype) if checkpoint is None else checkpoint.variables[name]
        own_bytes = np.frombuffer(np.ascontiguousarray(rows, dtype).tobytes(), np.uint8)
        [all_bytes] = collective.broadcast([tf.constant(own_bytes)], name=name)
        whole = np.frombuffer(all_bytes.numpy().tobytes(), dtype).reshape(whole_shape)
        first_row = world.rank * num_rows
        variable.assign(whole[first_row : first_row + num_rows])


def require_saved_rows(checkpoint: Checkpoint | None, name: str, shape: tuple[int, ...]) -> None:
    """Raise UsageError if the checkpoint has no rows of this name and shape."""
    saved = checkpoint.variables.get(name) if checkpoint is not None else None
    if saved is None:
        what = "holds none"
    elif saved.shape != shape:
        what = f"holds it of shape {saved.shape}"
    else:
        return
    raise UsageError(
        f"{name.removeprefix(PREFIX)} needs its state, of shape {shape}, from the checkpoint to resume from, which "
        f"{what}. Bring back the model that the run began with, or start a new run with --resume never."
    )


def without_row_state(values: Mapping[str, npt.NDArray]) -> Arrays:
    """Return a checkpoint's other variables."""
    return {name: value for name, value in values.items() if not name.startswith(PREFIX)}
