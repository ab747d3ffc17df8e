"""Interface of collective communication, in MPI's and NCCL's terms."""

from __future__ import annotations

import abc
import os
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ringtrain.runtime.private import mark_operation
from ringtrain.runtime.world import World

if TYPE_CHECKING:
    import tensorflow as tf

MARK = "_collective"
NOT_SCALED = (0, 1.0)


class Totals(NamedTuple):
    tensors: list[tf.Tensor]
    # Sums of squares, float64 [len(tensors)]; None if ``list_types`` lacks a type. Finite if all values are, except
    # float64 (overflow); zero for integers.
    squares: tf.Tensor | None = None


class Collective(abc.ABC):
    """Communication among all ranks. Every rank must make each call; ``name`` identifies it."""

    description: str
    # Same on all ranks. True: gradients are reduced in groups during the backward pass; False: by one ordered sum.
    overlaps_compute: bool = True
    is_ordered: bool = False  # every rank must make all calls in the same order
    may_use_mpi: bool = False
    sums_bfloat16: bool = True
    list_types: Collection[str] = ()  # in ``sum_in_order``, many tensors of these are as fast as one

    def __init__(self, world: World) -> None:
        self.world = world
        self.pid = os.getpid()  # a forked process shares the connections: it must not use them

    @abc.abstractmethod
    def all_reduce(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """Sum each tensor over all ranks, in graphs and eagerly.

        Args:
            tensors: of one type, any shapes, the same on every rank.
            name: unique in a graph.
        """

    def sum_in_order(
        self,
        tensors: Sequence[tf.Tensor],
        *,
        name: str,
        read_only: bool = False,
        scaled: tuple[int, float] = NOT_SCALED,
    ) -> Totals:
        """Sum like ``all_reduce``, without negotiation: every rank makes these sums in the same order, one at a time.

        Args:
            tensors: of one type, or of several in ``list_types``.
            name: unique in a graph.
            read_only: the sums may be in shared memory until the next sum of this name: no variable may take over their
                buffers. Same on all ranks.
            scaled: number of leading tensors to scale, and the factor; only for ``list_types``.
        """
        del read_only, scaled
        return Totals(self.all_reduce(tensors, name=name))

    @abc.abstractmethod
    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Concatenate ``[n_r, ...]`` to ``[sum of n_r, ...]``, in rank order."""

    def reduce_scatter(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Sum ``[size * n]``; return this rank's ``[n]``."""
        [total] = self.all_reduce([tensor], name=name)
        length = tensor.shape[0] // self.world.size
        return total[self.world.rank * length : (self.world.rank + 1) * length]

    def all_gather_pieces(
        self, pieces: Sequence[tf.Tensor], begins: Sequence[int], shapes: Sequence[Sequence[int]], *, name: str
    ) -> list[tf.Tensor] | None:
        """Assemble tensors from the ranks' pieces; None if ``all_gather`` is as good.

        Args:
            pieces: this rank's piece of each tensor, as a vector, possibly empty.
            begins: offset of each piece in its flattened tensor.
            shapes: of the whole tensors.
            name: as for ``all_reduce``; ordered. Results are read only until the next call; a variable may take over a
                whole tensor.
        """
        return None

    @abc.abstractmethod
    def broadcast(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """Return rank 0's tensors. Shapes and types are the same on all ranks."""

    def yield_core(self) -> None:  # noqa: B027, a backend may have nothing to do
        """Lower the priority of the backend's threads."""

    def start_timeline(self, directory: str, name: str) -> None:  # noqa: B027
        """Start a ``chrome://tracing`` trace in rank 0's directory. Collective."""

    def stop_timeline(self) -> None:  # noqa: B027
        ...

    def close(self) -> None:  # noqa: B027
        """Shut down, after the last call of every rank."""

    def abort(self, exit_code: int) -> None:
        """Exit without waiting for any rank, unlike Horovod's and MPI's exits. The launcher stops the others."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


class Solo(Collective):
    description = "none (one process)"

    def all_reduce(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return list(tensors)

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        return tensor

    def broadcast(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return list(tensors)


def mark_collective(outputs: list[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Keep TensorFlow's optimizer from merging collectives with the same input.

    Horovod's are not stateful, and a rank with another graph would wait for both. ``MARK`` also distinguishes them from
    user-defined operations.
    """
    import tensorflow as tf

    if not tf.executing_eagerly():
        mark_operation(outputs[0].op, MARK, name.encode())
    return outputs
