"""Placement and resource use of each rank, for the events of a run directory."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.runtime.machine import format_cores

MAX_RANKS = 2000  # limits the line length in metrics.jsonl


def describe_ranks(collective: Collective) -> list[dict[str, Any]]:
    """Describe all ranks, in their order. Collective."""
    gpus = tf.config.get_visible_devices("GPU")
    mine = {
        "node": collective.world.node,
        "pid": os.getpid(),
        "device": gpus[0].name.removeprefix("/physical_device:") if gpus else "CPU",
        "cores": format_cores(tuple(os.sched_getaffinity(0))),
    }
    return all_gather_object(collective, mine, name="ranks")[:MAX_RANKS]


def gather_usage(collective: Collective, seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """``seconds``: this rank's, by part of the step. Collective."""
    mine = {
        **{name: round(value, 3) for name, value in seconds.items()},
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,  # Linux: KiB
    }
    if tf.config.get_visible_devices("GPU"):
        with contextlib.suppress(Exception):  # optional on some devices
            mine["peak_gpu_memory_mib"] = tf.config.experimental.get_memory_info("GPU:0")["peak"] // 2**20
    return all_gather_object(collective, mine, name="usage")[:MAX_RANKS]
