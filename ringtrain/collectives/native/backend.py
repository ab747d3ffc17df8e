"""Sums and gathers by ringtrain's own C++ operations (see ``transport.h``).

A sum waits neither for Horovod's cycle nor for Python. Ordered sums need no negotiation.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from ringtrain.collectives.base import NOT_SCALED, Collective, Totals, mark_collective
from ringtrain.collectives.native import library
from ringtrain.collectives.native.memory import share_memory
from ringtrain.collectives.objects import all_gather_object
from ringtrain.files.atomic import replace_text

# Spin first: the core is otherwise idle, and waking takes longer than a short sum.
SPIN_SECONDS = 200e-6
ON_GPUS = "the ranks compute on GPUs"
NO_MEMORY_OF_OTHERS = (
    "the ranks of a node cannot open memory of each other: they are in several containers, or at a limit"
)
MAX_NODES = 8


class Native(Collective):
    """Collective for ranks on cores, with equally many on each node."""

    list_types = ("float16", "bfloat16", "float32", "float64", "int32", "int64")

    def __init__(
        self, carrier: Collective, operations: library.Operations, group: int, *, overlaps_compute: bool
    ) -> None:
        """``carrier`` does what is not summed natively: unordered calls, unless it orders all. Ranks with one core do
        not overlap compute.
        """
        super().__init__(carrier.world)
        self.is_ordered = carrier.is_ordered
        self.overlaps_compute = overlaps_compute
        what = "sums" if self.is_ordered else "short sums" if overlaps_compute else "gradients"
        self.description = f"{carrier.description}, {what} natively"
        self._carrier, self._operations, self._group = carrier, operations, group
        self._names: dict[int, str] = {}
        self._timeline = Path()

    def all_reduce(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        # Horovod has no bfloat16. Functions run these in program order.
        if self.is_ordered or any(tensor.dtype == tf.bfloat16 for tensor in tensors):
            return self.sum_in_order(tensors, name=name).tensors
        return self._carrier.all_reduce(tensors, name=name)

    def sum_in_order(
        self,
        tensors: Sequence[tf.Tensor],
        *,
        name: str,
        read_only: bool = False,
        scaled: tuple[int, float] = NOT_SCALED,
    ) -> Totals:
        if any(tensor.dtype.name not in self.list_types for tensor in tensors):
            return self._carrier.sum_in_order(tensors, name=name)
        totals, squares = self._operations.all_reduce(
            tensors=list(tensors),
            group=self._group,
            meaning=self._note(name),
            may_share=read_only,
            num_scaled=scaled[0],
            scale=struct.unpack("<q", struct.pack("<d", scaled[1]))[0],
            name="native_all_reduce",
        )
        mark_collective([squares], name)
        return Totals(list(totals), squares)

    def reduce_scatter(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        return (
            super().reduce_scatter(tensor, name=name)
            if self.is_ordered or tensor.dtype == tf.bfloat16
            else self._carrier.reduce_scatter(tensor, name=name)
        )

    def all_gather_pieces(
        self, pieces: Sequence[tf.Tensor], begins: Sequence[int], shapes: Sequence[Sequence[int]], *, name: str
    ) -> list[tf.Tensor] | None:
        if self.world.local_size < self.world.size or any(each.dtype.name not in self.list_types for each in pieces):
            return None
        wholes, nothing = self._operations.all_gather(
            tensors=list(pieces),
            group=self._group,
            meaning=self._note(name),
            may_share=True,
            ranks=[len(shape) for shape in shapes],
            dims=[length for shape in shapes for length in shape],
            begins=list(begins),
            name="native_all_gather",
        )
        mark_collective([nothing], name)
        for whole, shape in zip(wholes, shapes, strict=True):
            whole.set_shape(shape)
        return list(wholes)

    def _note(self, name: str) -> int:
        meaning = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        self._names[meaning] = name
        return meaning

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        if not self.is_ordered:
            if tensor.dtype == tf.bfloat16:
                return tf.bitcast(self._carrier.all_gather(tf.bitcast(tensor, tf.uint16), name=name), tf.bfloat16)
            return self._carrier.all_gather(tensor, name=name)
        rank, size = self.world.rank, self.world.size
        count = tf.one_hot(rank, size, dtype=tf.int64) * tf.shape(tensor, tf.int64)[0]
        [counts] = self.all_reduce([count], name=f"{name}/rows")
        around = [tf.reduce_sum(counts[:rank]), tf.reduce_sum(counts[rank + 1 :])]
        bits = _to_bits(tensor)
        [joined] = self.all_reduce([tf.pad(bits, [around, *[[0, 0]] * (bits.shape.rank - 1)])], name=name)
        return tf.ensure_shape(_from_bits(joined, tensor.dtype), [None, *tensor.shape[1:]])

    def broadcast(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        if not self.is_ordered:
            return self._carrier.broadcast(tensors, name=name)
        bits = [_to_bits(tensor) for tensor in tensors]
        totals = self.all_reduce(bits if self.world.is_rank0 else [*map(tf.zeros_like, bits)], name=name)
        return [_from_bits(total, tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)]

    def start_timeline(self, directory: str, name: str) -> None:
        self._carrier.start_timeline(directory, name)
        self._timeline = Path(directory, f"native-{name}.json")
        library.record(self._group, True)

    def stop_timeline(self) -> None:
        self._carrier.stop_timeline()
        mine = [(self._names[event.meaning], *event.figures) for event in library.record(self._group, False)]
        of_ranks = all_gather_object(self, mine, name="timeline")
        if self.world.is_rank0:
            replace_text(self._timeline, json.dumps(draw_timeline(of_ranks)))

    def close(self) -> None:
        self._carrier.close()


def draw_timeline(of_ranks: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return events in Chrome's trace format.

    ``of_ranks``: each rank's sums: name, bytes, and times of call, match (between nodes: with the same local rank
    there) and end in nanoseconds by its node's clock.
    """
    events: list[dict[str, Any]] = []
    for rank, sums in enumerate(of_ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for name, num_bytes, begun, met, ended in sums:
            for phase, start, end in (("wait", begun, met), (name, met, ended)):
                span = {"ts": start / 1000, "dur": (end - start) / 1000, "pid": rank, "tid": 0}
                events.append({"ph": "X", "name": phase, "args": {"sum": name, "bytes": num_bytes}, **span})
    return events


def _to_bits(tensor: tf.Tensor) -> tf.Tensor:
    """Return integers whose sum with zeros has the same bits."""
    if tensor.dtype == tf.bool:
        return tf.cast(tensor, tf.int32)
    if tensor.dtype.size < 4:
        return tf.cast(tf.bitcast(tensor, tf.uint8 if tensor.dtype.size == 1 else tf.uint16), tf.int32)
    return tf.bitcast(tensor, tf.int32 if tensor.dtype.size == 4 else tf.int64)


def _from_bits(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.bool:
        return tf.cast(bits, dtype)
    if dtype.size < 4:
        bits = tf.cast(bits, tf.uint8 if dtype.size == 1 else tf.uint16)
    return tf.bitcast(bits, dtype)


def join(collective: Collective, *, stall_seconds: float = 0.0) -> Native | str:
    """Return the ranks with native sums, or the reason why not, the same on all. Collective.

    A rank reports waits of ``stall_seconds``; 0: never.
    """
    world = collective.world

    def on_all(value: Any) -> list[Any]:
        return all_gather_object(collective, value, name="native")

    def on_node(value: Any) -> list[Any]:
        of_node = [its[1:] for its in on_all([world.node, world.local_rank, value]) if its[0] == world.node]
        return [its for _, its in sorted(of_node, key=operator.itemgetter(0))]

    def first_reason(reason: str | None) -> str | None:
        return next(filter(None, on_all(reason)), None)

    operations = None if tf.config.get_visible_devices("GPU") else library.load_operations()
    cores = sorted(os.sched_getaffinity(0))
    facts = on_all([world.node, world.local_rank, cores, os.getpid(), _why_not(collective, operations)])
    reasons = [*(reason for *_, reason in facts), why_no_nodes([(node, rank) for node, rank, *_ in facts])]
    if reason := next(filter(None, reasons), None):
        return reason
    nodes = library.find_nodes(world.local_rank, world.rank) if world.local_size < world.size else library.Nodes()
    with share_memory(world.local_rank, on_node) as descriptor:
        if reason := first_reason(None if descriptor is not None else NO_MEMORY_OF_OTHERS):
            return reason
        assert descriptor is not None
        of_node = sorted((fact for fact in facts if fact[0] == world.node), key=operator.itemgetter(1))
        is_shared = len({core for _, _, its_cores, *_ in of_node for core in its_cores}) < world.local_size
        processes = [process for *_, process, _ in of_node]
        patience = library.Patience(0.0 if is_shared else SPIN_SECONDS, stall_seconds)
        group = library.join(descriptor, world.local_rank, processes, patience, nodes)
    if reason := first_reason(None if group >= 0 else "no shared memory for the ranks of a node"):
        return reason
    has_one_core = all(len(its_cores) == 1 for _, _, its_cores, *_ in facts)
    assert operations is not None
    native = Native(collective, operations, group, overlaps_compute=not has_one_core)
    total = native.sum_in_order([tf.constant(world.rank + 1.0)], name="checks/native").tensors[0]
    if reason := first_reason(
        None if float(total) == sum(range(1, world.size + 1)) else f"its sum is {float(total):g}"
    ):
        return reason
    if has_one_core:
        collective.yield_core()
    return native


def _why_not(collective: Collective, operations: library.Operations | None) -> str | None:
    if tf.config.get_visible_devices("GPU"):
        return ON_GPUS
    if operations is None:
        return f"{library.LIBRARY.name} is not there, or not for this processor: run `make setup` with a C++ compiler"
    if collective.world.local_size < collective.world.size and not collective.may_use_mpi:
        return "between nodes it needs MPI with MPI_THREAD_MULTIPLE, which the ranks have not"
    return None


def why_no_nodes(places: Sequence[tuple[str, int]]) -> str | None:
    """Check ranks [(node, local rank)]."""
    ranks_of_nodes: dict[str, list[int]] = {}
    for node, local_rank in places:
        ranks_of_nodes.setdefault(node, []).append(local_rank)
    if twice := [node for node, ranks in ranks_of_nodes.items() if len(set(ranks)) < len(ranks)]:
        return f"nodes have the same name ({', '.join(twice[:MAX_NODES])})"
    if len({len(ranks) for ranks in ranks_of_nodes.values()}) > 1:
        numbers = ", ".join(f"{len(ranks)} on {node}" for node, ranks in list(ranks_of_nodes.items())[:MAX_NODES])
        return f"the nodes have not equally many ranks ({numbers})"
    return None
