"""All ranks must have the same data, as far as that shows without reading them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringtrain.collectives import Collective, gather_objects
from ringtrain.data.sources import from_arrays, from_callable
from ringtrain.errors import DataError
from ringtrain.guard.preflight import require_same_sources
from ringtrain.workloads.base import Sources
from tests.world.group import on_ranks


class Printed:
    """Five samples with a fingerprint."""

    num_samples = 5

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint


def arrays(count: int) -> Any:
    return from_arrays(np.zeros(count), np.zeros(count))


def feed(steps_per_epoch: int) -> Any:
    return from_callable(lambda rank, step: None, steps_per_epoch=steps_per_epoch)


# For each case: what rank 0 has, what the last rank has, and what is said of them.
CASES: dict[str, tuple[Any, Any, list[str]]] = {
    "counts": (arrays(5), arrays(6), [" 5 samples", " 6 samples"]),
    "files": (Printed("a" * 64), Printed("b" * 64), ["fingerprint aaaaaaaaaaaa", "fingerprint bbbbbbbbbbbb"]),
    "nothing": (None, arrays(6), [" nothing", " 6 samples"]),
    "something": (arrays(6), None, [" 6 samples", " nothing"]),
    "feeds": (feed(3), feed(4), ["a feed of 3 steps an epoch", "a feed of 4 steps an epoch"]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("part", ["train", "evaluation"])
@on_ranks(2, 3)
def test_other_data_on_another_rank_are_an_error_on_every_rank(collective: Collective, case: str, part: str) -> None:
    first, last, words = CASES[case]
    is_last = collective.world.rank == collective.world.size - 1
    values = {"train": arrays(7), "evaluation": arrays(7), part: last if is_last else first}
    with pytest.raises(DataError) as error:
        require_same_sources(collective, Sources(**values))
    assert all(word in str(error.value) for word in [part, f"rank {collective.world.size - 1} on", *words])
    assert len(set(gather_objects(collective, str(error.value), name="message"))) == 1


@on_ranks(2)
def test_the_same_data_are_no_error(collective: Collective) -> None:
    parts: list[tuple[Any, Any]] = [(arrays(3), None), (Printed("a"), arrays(2)), (feed(3), None)]
    for train, evaluation in parts:
        require_same_sources(collective, Sources(train, evaluation))
