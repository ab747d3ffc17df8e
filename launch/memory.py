"""Whether the kernel has killed processes for want of memory, and whose limit it was."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ringtrain.runtime.machine import read_memory_limits

ROOT = Path("/")
NODE = "the node's memory, or the limit of another job on it"
GIB = 2**30


def count_kills(root: Path = ROOT) -> dict[str, int]:
    """How many processes were killed so far, by the limit that they were killed for, in words; the tightest first.

    ``oom_kill`` of /proc/vmstat counts the kills of all limits.
    """
    counts: dict[str, int] = {}
    for limit, file in read_memory_limits(root):
        if (killed := _read_kills(file)) is not None:
            counts.setdefault(f"the limit of {limit / GIB:.3g} GiB of its cgroup", killed)
    node = _read_kills(root / "proc/vmstat")
    return counts | ({NODE: node} if node is not None else {})


def find_limit(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """The limit for which a process was killed between two counts, in words; None where none was."""
    return next((limit for limit, count in after.items() if count > before.get(limit, count)), None)


def _read_kills(file: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
