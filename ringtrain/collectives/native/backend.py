"""Ordered sums of the ranks of a node by an operation of ringtrain's own; all else Horovod carries.

The operation is in C++, and TensorFlow calls it itself: a sum waits neither for Horovod's cycle, nor for Python's
interpreter. Where a step makes all its sums at one place, the ranks need no agreement on an order: whoever comes there
waits for the others, and for nothing else. ``transport.h`` says how they add.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ringtrain.collectives.base import Collective, Totals, mark_collective
from ringtrain.collectives.horovod import HorovodCollective
from ringtrain.collectives.native import library
from ringtrain.collectives.native.memory import share_memory
from ringtrain.collectives.objects import all_gather_object
from ringtrain.errors import UsageError

# How long a rank looks at what another has given before it sleeps: its core is wanted by nobody else meanwhile, and to
# be woken takes longer than a short sum.
SPIN_SECONDS = 200e-6


class Native(HorovodCollective):
    """The collective of a run whose ranks are on the cores of one node."""

    list_types = ("float16", "bfloat16", "float32", "float64", "int32", "int64")

    def __init__(
        self, carrier: HorovodCollective, operation: Callable[..., Any], group: int, *, overlaps_compute: bool
    ) -> None:
        """The ranks have joined as this group; ``carrier`` carries what is not ordered.

        Where a rank has one core, the carrier's sums do not overlap compute, since they take it as well: then all
        gradients are best ordered.
        """
        super().__init__(carrier.world, carrier.hvd, carrier.threads)
        self.overlaps_compute = overlaps_compute
        what = "short sums" if overlaps_compute else "gradients"
        self.description += f", {what} natively"
        self._operation, self._group = operation, group

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, ordered: bool = False, read_only: bool = False
    ) -> Totals:
        if not ordered or any(tensor.dtype.name not in self.list_types for tensor in tensors):
            return super().all_reduce(tensors, name=name)
        meaning = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        totals, squares = self._operation(
            tensors=list(tensors), group=self._group, meaning=meaning, may_share=read_only, name="native_all_reduce"
        )
        mark_collective([squares], name)
        return Totals(list(totals), squares, keep_alive=totals if read_only else ())


def join_node(collective: Collective) -> Collective:
    """The same ranks, which are on the cores of one node: a UsageError where they are not. Every rank must call it."""
    world = collective.world
    if not isinstance(collective, HorovodCollective):
        return collective  # a single process

    def on_all(value: Any) -> list[Any]:
        return all_gather_object(collective, value, name="native")

    operation = library.load_operation()
    facts = on_all([_why_not(collective, operation), sorted(os.sched_getaffinity(0)), os.getpid()])
    _require_none([reason for reason, _, _ in facts])
    descriptor = share_memory(world.rank, on_all)
    if descriptor is None:
        raise _refusal("the ranks cannot open memory of each other: they are in several containers, or at a limit")
    cores = [its_cores for _, its_cores, _ in facts]
    is_shared = len({core for its_cores in cores for core in its_cores}) < world.size
    pids = [pid for _, _, pid in facts]
    group = library.join(descriptor, world.rank, pids, 0 if is_shared else SPIN_SECONDS)
    os.close(descriptor)
    _require_none(on_all(None if group >= 0 else "there is no memory for what the ranks share"))
    has_one_core = all(len(its_cores) == 1 for its_cores in cores)
    if has_one_core:
        collective.yield_core()
    native = Native(collective, operation, group, overlaps_compute=not has_one_core)
    total = native.all_reduce([tf.constant(world.rank + 1.0)], name="checks/native", ordered=True).tensors[0]
    _require_none(on_all(None if float(total) == sum(range(1, world.size + 1)) else f"its sum is {float(total):g}"))
    return native


def _why_not(collective: HorovodCollective, operation: Callable[..., Any] | None) -> str | None:
    """Why this rank cannot join, in the user's words."""
    world = collective.world
    if world.local_size < world.size:
        return f"the ranks are on several nodes ({world.local_size} of {world.size} on {world.node})"
    if tf.config.get_visible_devices("GPU"):
        return "the ranks compute on GPUs"
    if operation is None:
        return f"{library.LIBRARY.name} is not there, or not for this processor: run `make setup` with a C++ compiler"
    return None


def _require_none(reasons: Sequence[str | None]) -> None:
    """A UsageError on every rank where there is a reason on any."""
    if reason := next(filter(None, reasons), None):
        raise _refusal(reason)


def _refusal(reason: str) -> UsageError:
    return UsageError(f"backend is 'native', which sums among the cores of one node, but {reason}. Use --backend auto.")
