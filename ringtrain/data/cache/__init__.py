"""Decoded samples kept: decoded once for each node, or once for each rank, instead of once for each epoch."""

from __future__ import annotations

from typing import Literal

from ringtrain.collectives import Collective, raise_on_all_ranks
from ringtrain.data.cache.layout import find_layout
from ringtrain.data.cache.memory import MemoryCachedSource, check_memory
from ringtrain.data.cache.node import open_node_cache
from ringtrain.data.sources import Source, is_fallible


def with_cache(
    source: Source,
    mode: Literal["none", "memory", "node"],
    collective: Collective,
    *,
    name: str,
    num_threads: int,
    reserved_bytes: int = 0,
) -> Source:
    """The source with a cache of its decoded samples; itself where it decodes nothing. Every rank must call it.

    Args:
        mode: ``"node"``: all samples are decoded now, by the ranks of each node together, into one file that they all
            map, and that later runs find. ``"memory"``: each rank keeps what it has decoded, which needs no disk, but
            as much memory for each rank: for a run of one rank.
        name: of the source, unique in the run.
        num_threads: processor threads for decoding.
        reserved_bytes: memory that this rank will need for what is cached already, and has not touched yet.

    Raises:
        DataError: there is not enough memory or space on the disk, or the ranks see different samples.
    """
    if mode == "none" or not is_fallible(source):
        return source
    if mode == "node":
        return open_node_cache(source, collective, name=name, num_threads=num_threads)
    layout = find_layout(source)
    local_size = collective.world.local_size
    raise_on_all_ranks(
        collective, lambda: check_memory(layout, local_size, reserved_bytes), name=f"cache/{name}/memory"
    )
    return MemoryCachedSource(source, layout)
