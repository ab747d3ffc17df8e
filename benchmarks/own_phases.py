"""A rank of ``python -m ringtrain`` that writes when its phases begin, and what its control collectives receive.

Usage: own_phases.py DIRECTORY START [ringtrain's arguments]; START: the launch, in seconds since the epoch.
"""

from __future__ import annotations

import atexit
import collections
import functools
import json
import os
import resource
import runpy
import sys
import time
from pathlib import Path
from typing import Any

directory, start = Path(sys.argv[1]), float(sys.argv[2])
phases: list[tuple[float, str, int]] = [(time.time() - start, "python", 0)]
received: collections.Counter[str] = collections.Counter()
calls: collections.Counter[str] = collections.Counter()
counts: dict[str, int] = {}

import ringtrain.collectives as collectives  # noqa: E402  # before others import its functions by name
from ringtrain.collectives import objects  # noqa: E402
from ringtrain.runtime import activity  # noqa: E402

set_phase, gather = activity.set_phase, objects.all_gather_object
HEAD_BYTES = 40


def note_phase(doing: Any, step: int = 0, **more: Any) -> None:
    phases.append((time.time() - start, doing.name, step))
    if step == 2 and not counts:
        files = [each.is_socket() for each in Path("/proc/self/fd").iterdir()]
        counts.update(threads=len(os.listdir("/proc/self/task")), sockets=sum(files))
    set_phase(doing, step, **more)


@functools.wraps(gather)
def note_gather(collective: Any, value: Any, *, name: str) -> list[Any]:
    given = gather(collective, value, name=name)
    sizes = [len(json.dumps([name, each])) for each in given]
    is_equal = all(each == given[0] for each in given)
    received[name] += HEAD_BYTES * len(given) + (0 if is_equal else sum(sizes))
    calls[name] += 1
    return given


def write() -> None:
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "phases": phases,
        "received": received,
        "calls": calls,
        **counts,
        "cpu_sec": usage.ru_utime + usage.ru_stime,
    }
    (directory / f"{rank}.json").write_text(json.dumps(found))


activity.set_phase = note_phase
objects.all_gather_object = collectives.all_gather_object = note_gather
atexit.register(write)
sys.argv = ["ringtrain", *sys.argv[3:]]
runpy.run_module("ringtrain", run_name="__main__")
