"""Start a run on this machine, or as a Slurm job.

python -m ringtrain launch local -np 2 -- --workload digits
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ringtrain.runtime.world import World


def main(arguments: Sequence[str], world: World) -> NoReturn:
    """Replace this process by ``launch``, since NumPy's threads may take the signals that it waits for."""
    del world
    package = "ringtrain.launch" if importlib.util.find_spec("ringtrain.launch") else "launch"
    os.execv(sys.executable, [sys.executable, "-m", package, *arguments])
