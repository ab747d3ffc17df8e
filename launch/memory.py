"""Whether the kernel has killed processes for want of memory, and whose limit it was."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ringtrain.runtime.machine import cgroup_directories

ROOT = Path("/")
NODE = "the node's memory, or the limit of another job on it"
# Where each kind of cgroup counts its processes that were killed, and keeps its limit in bytes.
CGROUP_FILES = (("", "memory.events", "memory.max"), ("memory", "memory.oom_control", "memory.limit_in_bytes"))
NO_LIMIT = 2**62  # version 1 writes it as the largest multiple of a page in 63 bits
GIB = 2**30


def count_kills(root: Path = ROOT) -> dict[str, int]:
    """How many processes were killed so far, by the limit that they were killed for, in words; the tightest first.

    Sources: Linux's Documentation/admin-guide/cgroup-v2.rst ("memory.events"), cgroup-v1/memory.rst
    ("memory.oom_control") and ``oom_kill`` of /proc/vmstat, which counts the kills of all limits.
    """
    counts: dict[str, int] = {}
    for controller, events, limit in CGROUP_FILES:
        for directory in cgroup_directories(root, controller):
            killed = _number_after("oom_kill", directory / events)
            size = _read(directory / limit).strip()
            if killed is not None and size.isdigit() and int(size) < NO_LIMIT:
                counts.setdefault(f"the limit of {int(size) / GIB:.3g} GiB of its cgroup", killed)
    node = _number_after("oom_kill", root / "proc/vmstat")
    return counts | ({NODE: node} if node is not None else {})


def find_limit(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """The limit for which a process was killed between two counts, in words; None where none was."""
    return next((limit for limit, count in after.items() if count > before.get(limit, count)), None)


def _number_after(word: str, file: Path) -> int | None:
    found = re.search(rf"^{word} (\d+)$", _read(file), re.MULTILINE)
    return int(found[1]) if found else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
