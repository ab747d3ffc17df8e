"""Exchange of plain values and errors between ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ringtrain.collectives.base import Collective
from ringtrain.errors import EXIT_CODES, RingtrainError
from ringtrain.runtime import activity
from ringtrain.runtime.shutdown import require_same_process

Result = TypeVar("Result")


def all_gather_object(collective: Collective, value: Any, *, name: str) -> list[Any]:
    """Gather values in rank order, as JSON: received data cannot run code. Collective.

    Outside of graphs Horovod ignores names: sending them detects ranks that diverged. Of values that are equal on all
    ranks only the digests are sent.
    """
    import tensorflow as tf

    require_same_process(collective.pid)
    data = json.dumps([name, value]).encode()
    digest = np.frombuffer(hashlib.blake2b(data, digest_size=32).digest(), np.int64)
    with activity.meeting(), tf.device("/CPU:0"):  # NCCL is not needed, and may not work yet
        heads = collective.all_gather(tf.constant([[len(data), *digest]], tf.int64), name="objects/heads").numpy()
        if (heads == heads[0]).all():
            return [json.loads(data)[1] for _ in heads]
        joined = collective.all_gather(tf.constant(np.frombuffer(data, np.uint8)), name="objects/data").numpy()
    said = [json.loads(part.tobytes()) for part in np.split(joined, np.cumsum(heads[:, 0])[:-1])]
    for rank, (place, _) in enumerate(said):
        if place != said[0][0]:
            raise RingtrainError(
                f"the ranks are at different places of the program: rank 0 at {said[0][0]!r}, rank {rank} at "
                f"{place!r}. Something that decides what comes next is not the same on them.",
                reach="run",
            )
    return [item for _, item in said]


def raise_on_all_ranks(collective: Collective, action: Callable[[], Result], *, name: str) -> Result:
    """Run an action; all ranks continue, or all raise the first failed rank's error. Collective."""
    result, failure = _attempt(collective, action)
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
    """Return rank 0's JSON result, or raise its error, on every rank. Collective."""
    outcome = _attempt(collective, action) if collective.world.is_rank0 else (None, None)
    result, failure = all_gather_object(collective, outcome, name=name)[0]
    if failure:
        raise _error(failure)
    return result


def _attempt(collective: Collective, action: Callable[[], Result]) -> tuple[Result | None, dict[str, Any] | None]:
    try:
        return action(), None
    except RingtrainError as error:
        require_same_process(collective.pid)  # raised with the error as its context
        return None, {"message": str(error), "exit_code": error.exit_code}


def _error(failure: dict[str, Any]) -> RingtrainError:
    return EXIT_CODES.get(failure["exit_code"], RingtrainError)(failure["message"], reach="run")
