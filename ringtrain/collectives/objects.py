"""Plain values and errors that all ranks share, by any backend."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ringtrain.collectives.base import Collective
from ringtrain.errors import EXIT_CODES, RingtrainError
from ringtrain.runtime import activity

Result = TypeVar("Result")


def all_gather_object(collective: Collective, value: Any, *, name: str) -> list[Any]:
    """Every rank's value, in the order of the ranks. Values travel as JSON: nothing received can run code.

    Ranks that are at different places of the program meet all the same, to be told so: the name travels with the value,
    since outside of a graph Horovod does not see that of a collective.
    """
    import tensorflow as tf

    data = np.frombuffer(json.dumps([name, value]).encode(), np.uint8)
    with activity.meeting(), tf.device("/CPU:0"):  # not by NCCL, which may not work yet, and is not needed
        lengths = collective.all_gather(tf.constant([data.size], tf.int64), name="objects/lengths").numpy()
        joined = collective.all_gather(tf.constant(data), name="objects/data").numpy()
    said = [json.loads(part.tobytes()) for part in np.split(joined, np.cumsum(lengths)[:-1])]
    for rank, (place, _) in enumerate(said):
        if place != said[0][0]:
            raise RingtrainError(
                f"the ranks are at different places of the program: rank 0 at {said[0][0]!r}, rank {rank} at "
                f"{place!r}. Something that decides what comes next is not the same on them.",
                reach="run",
            )
    return [item for _, item in said]


def raise_on_all_ranks(collective: Collective, action: Callable[[], Result], *, name: str) -> Result:
    """Do something that may fail on some ranks, so that either all continue or all raise.

    If ``action`` raised a RingtrainError on any rank, it is every rank's: the first such rank's, with ranks and host
    named where not all failed alike.
    """
    result, failure = _attempt(action)
    failures = all_gather_object(collective, failure and {**failure, "node": collective.world.node}, name=name)
    failed = [rank for rank, item in enumerate(failures) if item]
    if not failed:
        return result  # type: ignore[return-value]
    first = failures[failed[0]]
    if len({item and item["message"] for item in failures}) > 1:
        ranks = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))} of {len(failures)}"
        first["message"] = f"{ranks} (the first on {first['node']}): {first['message']}"
    raise _error(first)


def run_on_rank0(collective: Collective, action: Callable[[], Any], *, name: str) -> Any:
    """Do something on rank 0 alone and give every rank its result (a JSON value), or its error."""
    outcome = _attempt(action) if collective.world.is_rank0 else (None, None)
    result, failure = all_gather_object(collective, outcome, name=name)[0]
    if failure:
        raise _error(failure)
    return result


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, dict[str, Any] | None]:
    """The result of an action, and its error in a form that can be sent."""
    try:
        return action(), None
    except RingtrainError as error:
        return None, {"message": str(error), "exit_code": error.exit_code}


def _error(failure: dict[str, Any]) -> RingtrainError:
    return EXIT_CODES.get(failure["exit_code"], RingtrainError)(failure["message"], reach="run")
