"""Caches of decoded samples, per node or per rank."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from ringtrain.collectives import Collective, raise_on_all_ranks
from ringtrain.data.cache.node import CachedSource, Layout, find_layout, open_node_cache
from ringtrain.data.indexed import IndexedSource
from ringtrain.data.sources import Source, is_fallible
from ringtrain.errors import DataError, UsageError
from ringtrain.runtime.machine import read_memory_limits

MEMORY_FILE = Path("/proc/meminfo")


def with_cache(
    source: Source,
    mode: Literal["none", "memory", "node"],
    collective: Collective,
    *,
    name: str,
    num_threads: int,
    reserved_bytes: int = 0,
) -> Source:
    """Cache decoded samples, if the source decodes. Collective.

    Args:
        mode: ``"node"``: decode all samples now into one file per node, reused by later runs; ``"memory"``: per rank.
        name: unique in the run.
        reserved_bytes: memory that earlier caches will still use.
    """
    if mode == "none" or not is_fallible(source):
        return source
    if mode == "node" and isinstance(source, IndexedSource):
        raise UsageError(
            "cache is 'node', which later runs find as well, and nothing says whether the samples of from_grain are "
            "still the same then. Use --cache memory, or --cache none."
        )
    if mode == "node":
        return open_node_cache(source, collective, name=name, num_threads=num_threads)
    layout = find_layout(source)
    local_size = collective.world.local_size
    raise_on_all_ranks(
        collective, lambda: _check_memory(layout, local_size, reserved_bytes), name=f"cache/{name}/memory"
    )
    # Untouched arrays take no memory.
    arrays = [np.empty((layout.num_samples, *shape), dtype) for shape, dtype in layout.tensors]
    return CachedSource(source, layout, np.zeros(layout.num_samples, bool), arrays)


def _check_memory(layout: Layout, local_size: int, reserved_bytes: int) -> None:
    needed = layout.num_samples * layout.bytes_per_sample * local_size
    lines = MEMORY_FILE.read_text().splitlines()
    kilobytes = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)
    limits = [limit for limit, _ in read_memory_limits(Path("/"))]  # of containers and jobs
    available = min([kilobytes * 1024, *limits]) - reserved_bytes * local_size
    if needed > available:
        raise DataError(
            f"cache is 'memory', but {layout.num_samples:,} decoded samples for each of {local_size} ranks need "
            f"{needed:,} bytes, and this node has {available:,} bytes of memory available. Use --cache node, which "
            "keeps them once, in a file, or --cache none.",
            reach="node",
        )
