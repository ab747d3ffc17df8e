"""How a workload is made of its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ringtrain.workloads import create_workload
from ringtrain.workloads.polynomial import Polynomial


class Wide(Polynomial):
    """Reads its option when it is made."""

    options: ClassVar[Mapping[str, Any]] = {"width": 64}

    def __init__(self) -> None:
        self.doubled = 2 * self.options["width"]


def test_options_are_there_when_the_workload_is_made() -> None:
    workload = create_workload(Wide, {"width": 3})
    assert isinstance(workload, Wide)
    assert (workload.doubled, workload.options) == (6, {"width": 3})
    assert Wide().doubled == 128
