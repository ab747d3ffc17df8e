"""The interface of collective communication, in MPI's and NCCL's terms, and its implementation for one process."""

from __future__ import annotations

import abc
import os
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ringtrain.runtime.world import World

if TYPE_CHECKING:
    import tensorflow as tf

MARK = "_collective"  # an attribute of TensorFlow's
NOT_SCALED = (0, 1.0)


class Totals(NamedTuple):
    """Sums over all ranks, equal on each."""

    tensors: list[tf.Tensor]  # in the order given
    # float64 [len(tensors)]: the sum of squares of each, if known. Of ``list_types`` it is finite where all values
    # are, except for float64, whose squares may be too large; zero for integers.
    squares: tf.Tensor | None = None


class Collective(abc.ABC):
    """Communication among all ranks. Each call must be made by every rank; ``name`` says which call is meant."""

    world: World
    description: str  # who carries the communication, such as ``"Horovod over MPI"``
    # True if sums travel while this rank computes, on all ranks. Gradients then leave in groups, as the backward
    # pass makes them; otherwise all at once, by an ordered sum.
    overlaps_compute: bool = True
    is_ordered: bool = False  # whether every rank must come to all calls in the same order, not to ordered sums alone
    may_use_mpi: bool = False  # whether MPI may be called as well
    list_types: Collection[str] = ()  # of which an ordered sum takes many tensors, also of several, as fast as one

    @abc.abstractmethod
    def all_reduce(
        self,
        tensors: Sequence[tf.Tensor],
        *,
        name: str,
        ordered: bool = False,
        read_only: bool = False,
        scaled: tuple[int, float] = NOT_SCALED,
    ) -> Totals:
        """Add each tensor over all ranks; works in graphs and eagerly.

        Args:
            tensors: of one type (unless of ``list_types``), any shapes, the same on every rank.
            name: unique in a graph; ranks with the same name meet.
            ordered: every rank comes to its ordered sums in the same order, one at a time, as MPI and NCCL ask of all.
                So nothing is agreed on before, and what is short is there at once.
            read_only: nothing writes to the sums, which may then lie in memory that others read, for which nobody has
                to copy them, until the same is summed again. So no variable takes over a part of one. Alike on all
                ranks.
            scaled: of how many of the first tensors the sums are multiplied, and by what; of ordered sums of
                ``list_types`` alone, if it takes no further pass over memory.
        """

    @abc.abstractmethod
    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Concatenate ``[n_r, ...]`` of all ranks, in the order of the ranks, to ``[sum of n_r, ...]``."""

    def reduce_scatter(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Add ``[size * n]`` over all ranks; of the sum this rank's ``[n]``, in the order of the ranks."""
        [total] = self.all_reduce([tensor], name=name).tensors
        length = tensor.shape[0] // self.world.size
        return total[self.world.rank * length : (self.world.rank + 1) * length]

    def all_gather_pieces(
        self, pieces: Sequence[tf.Tensor], begins: Sequence[int], shapes: Sequence[Sequence[int]], *, name: str
    ) -> list[tf.Tensor] | None:
        """Put tensors together of which every rank has another piece; None if ``all_gather`` is as good.

        Args:
            pieces: of each tensor this rank's, as a vector, possibly of no values.
            begins: where in its tensor, as a vector, each of them begins.
            shapes: of the whole tensors, which the ranks' pieces fill.
            name: as of ``all_reduce``, and ordered as its ordered sums are. What returns is read only, as theirs may
                be; a variable may take over a whole tensor, which nothing then changes in place before the next call.
        """
        return None

    @abc.abstractmethod
    def broadcast(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """Rank 0's tensors, on every rank. Shapes and types are the same on every rank."""

    def yield_core(self) -> None:  # noqa: B027, a backend may have nothing to do
        """Let the backend's own threads run when nothing else of this process wants the core."""

    def start_timeline(self, directory: str, name: str) -> None:  # noqa: B027
        """From now on write down what the communication does; every rank calls it, rank 0's directory counts.

        The file there is for ``chrome://tracing``, and called after the backend and this name.
        """

    def stop_timeline(self) -> None:  # noqa: B027
        """Write no more, if that was begun."""

    def close(self) -> None:  # noqa: B027
        """Leave in good order, after the last call of every rank."""

    def abort(self, exit_code: int) -> None:
        """Leave at once, without waiting for any rank; never returns.

        The launcher stops the other ranks when one leaves with an error. Horovod's and MPI's own ways out wait for
        ranks that may never answer.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


class Solo(Collective):
    """The collective of a run of one process."""

    description = "none (one process)"

    def __init__(self, world: World) -> None:
        self.world = world

    def all_reduce(self, tensors: Sequence[tf.Tensor], *, name: str, **_: Any) -> Totals:
        return Totals(list(tensors))

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        return tensor

    def broadcast(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return list(tensors)


def mark_collective(outputs: list[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Let TensorFlow's optimizer not merge two collectives with the same input, as it does with stateless operations.

    Horovod's are not marked as stateful. A rank whose graph differs, having no samples, would wait for both. And what
    looks at a graph sees that such an operation is none of the user's (``MARK``).
    """
    import tensorflow as tf

    if not tf.executing_eagerly():
        outputs[0].op._set_attr(MARK, tf.compat.v1.AttrValue(s=name.encode()))
    return outputs
