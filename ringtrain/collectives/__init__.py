"""Collective communication: the interface ``Collective``, and ``connect``, which selects a backend."""

from ringtrain.collectives.base import Collective, Totals
from ringtrain.collectives.connect import connect, with_native_sums
from ringtrain.collectives.objects import all_gather_object, raise_on_all_ranks, run_on_rank0

__all__ = [
    "Collective",
    "Totals",
    "all_gather_object",
    "connect",
    "raise_on_all_ranks",
    "run_on_rank0",
    "with_native_sums",
]
