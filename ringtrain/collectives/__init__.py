"""What the ranks say to each other: a small Protocol, and ``connect``, which finds who carries it.

``reduce.py`` holds the reduction of gradients; the training step and ``ringtrain.keras`` both use it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from ringtrain.errors import EXIT_CODES, RingtrainError, UsageError
from ringtrain.runtime import activity
from ringtrain.runtime.world import World

if TYPE_CHECKING:
    import tensorflow as tf

Result = TypeVar("Result")


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

    def sum(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
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

    def gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
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


def connect(backend: Literal["auto", "horovod", "solo"], world: World) -> Collective:
    """Join the other ranks.

    Raises:
        UsageError: the backend is not installed, or it sees another world than the launcher.
    """
    if backend == "solo" and world.size > 1:
        raise UsageError(
            f"backend is 'solo', but {world.launcher} started {world.size} processes, each of which would train alone. "
            "Use --backend auto, or start one process.",
            reach="run",
        )
    if backend == "horovod" or (backend == "auto" and world.size > 1):
        from ringtrain.collectives.horovod import connect_horovod

        return connect_horovod(world)
    from ringtrain.collectives.solo import Solo

    return Solo(world)


def gather_objects(collective: Collective, value: Any, *, name: str) -> list[Any]:
    """Every rank's value, in the order of the ranks. Values travel as JSON: nothing received can run code.

    Outside of a graph Horovod does not see a collective's name: ranks that are at different places of the program meet
    where they happen to. So the name travels with the value.

    Raises:
        RingtrainError: on every rank, where they are at different places.
    """
    import tensorflow as tf

    data = np.frombuffer(json.dumps([name, value]).encode(), np.uint8)
    with activity.meeting(), tf.device("/CPU:0"):  # not by NCCL, which may not work yet, and is not needed
        lengths = collective.gather(tf.constant([data.size], tf.int64), name=f"{name}/lengths").numpy()
        joined = collective.gather(tf.constant(data), name=f"{name}/data").numpy()
    said = [json.loads(part.tobytes()) for part in np.split(joined, np.cumsum(lengths)[:-1])]
    for rank, (place, _) in enumerate(said):
        if place != said[0][0]:
            raise RingtrainError(
                f"the ranks are at different places of the program: rank 0 at {said[0][0]!r}, rank {rank} at "
                f"{place!r}. Something that decides what comes next is not the same on them.",
                reach="run",
            )
    return [item for _, item in said]


def agree(collective: Collective, action: Callable[[], Result], *, name: str) -> Result:
    """Do something that may fail on some ranks, so that either all go on or all raise.

    Returns:
        What ``action`` returned on this rank.

    Raises:
        RingtrainError: on every rank, when ``action`` raised one on any: the first such rank's, with ranks and host
            named where not all failed alike.
    """
    result, failure = _attempt(action)
    failures = gather_objects(collective, failure and {**failure, "node": collective.world.node}, name=name)
    failed = [rank for rank, item in enumerate(failures) if item]
    if not failed:
        return result  # type: ignore[return-value]
    first = failures[failed[0]]
    if len({item and item["message"] for item in failures}) > 1:
        ranks = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))} of {len(failures)}"
        first["message"] = f"{ranks} (the first on {first['node']}): {first['message']}"
    raise _error(first)


def on_first(collective: Collective, action: Callable[[], Any], *, name: str) -> Any:
    """Do something on rank 0 alone and give every rank its result (a JSON value), or its error."""
    outcome = _attempt(action) if collective.world.is_first else (None, None)
    result, failure = gather_objects(collective, outcome, name=name)[0]
    if failure:
        raise _error(failure)
    return result


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, dict[str, Any] | None]:
    """What an action returned, and the error that it raised in a form that travels."""
    try:
        return action(), None
    except RingtrainError as error:
        return None, {"message": str(error), "exit_code": error.exit_code}


def _error(failure: dict[str, Any]) -> RingtrainError:
    return EXIT_CODES.get(failure["exit_code"], RingtrainError)(failure["message"], reach="run")
