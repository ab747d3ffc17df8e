"""How a workload is made of its class."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from ringtrain.workloads import BUILT_IN, create_workload
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


def test_built_in_workloads_are_known_without_tensorflow() -> None:
    script = (
        "import sys; from ringtrain.workloads import BUILT_IN, load_workload\n"
        "print(len([load_workload(name).defaults for name in BUILT_IN]))\n"
        "print({'tensorflow', 'keras', 'horovod', 'sklearn'} & set(sys.modules))"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout == f"{len(BUILT_IN)}\nset()\n"
