"""What any backend can do: collective communication among all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ringtrain.runtime.world import World

if TYPE_CHECKING:
    import tensorflow as tf


class Totals(NamedTuple):
    """What was summed over all ranks, the same on each.

    Attributes:
        tensors: in the order given.
        squares: float64 [len(tensors)], the sum of squares of each; None where it takes another pass over them.
    """

    tensors: list[tf.Tensor]
    squares: tf.Tensor | None = None


class Collective(Protocol):
    """Communication among all ranks. Each call must be made by every rank; ``name`` says which call is meant."""

    @property
    def world(self) -> World:
        """Who this process is."""

    @property
    def description(self) -> str:
        """Who carries the communication, such as ``"Horovod over MPI"``."""

    def all_reduce(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """Add each tensor over all ranks; works in graphs and eagerly. All tensors are of one type.

        Args:
            tensors: any shapes, the same on every rank.
            name: unique in a graph; ranks with the same name meet.
        """

    def share_memory(self) -> None:
        """From now on ``sum_alone`` goes through memory, where all ranks are on the cores of one node.

        Every rank must call it, after they have met.
        """

    @property
    def sums_at_once(self) -> bool:
        """Whether what a step has to sum best goes through ``sum_alone``, of any size; alike on all ranks."""

    def sum_alone(self, tensors: Sequence[tf.Tensor], *, name: str, may_share: bool = False) -> Totals:
        """Like ``sum``, while no other call of this is under way on any rank.

        So nothing has to be agreed on before, and what is short is there at once.

        Args:
            tensors: of one dimension at least, and of the same shapes and types on every rank.
            name: as in ``sum``.
            may_share: whether the totals may lie in memory that the other ranks read, for which nobody has to copy
                them. TensorFlow writes to the memory of a part of a tensor, such as its first rows, where nothing else
                refers to it. So whoever says this keeps the totals until all that is made of them is computed, and
                lets no variable take over a part of them. Alike on all ranks.
        """

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Concatenate ``[n_r, ...]`` of all ranks, in the order of the ranks, to ``[sum of n_r, ...]``."""

    def broadcast(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """Rank 0's tensors, on every rank. Shapes and types are the same on every rank."""

    def start_timeline(self, path: str) -> None:
        """From now on write down, in this file of rank 0, what the communication does; every rank calls it."""

    def stop_timeline(self) -> None:
        """Write no more, where that was begun."""

    def close(self) -> None:
        """Leave in good order, after the last call of every rank."""

    def abort(self, exit_code: int) -> None:
        """Leave at once, without waiting for any rank; never returns."""
