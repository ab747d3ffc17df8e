"""Horovod over a process set, and names under which the ranks meet whatever their layers are called."""

from __future__ import annotations

import collections
import re
import socket
import weakref
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ringtrain.collectives import Totals
from ringtrain.collectives.horovod import HorovodCollective
from ringtrain.errors import UsageError
from ringtrain.runtime.world import World

# TensorFlow's graphs of the branches and bodies within a function.
BRANCH_GRAPHS = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")

_uses: weakref.WeakKeyDictionary[tf.Graph, collections.Counter[str]] = weakref.WeakKeyDictionary()


class ProcessSetCollective(HorovodCollective):
    """Carries sums among the ranks of a process set.

    Ranks meet by the last part of an operation's name alone: the scopes before it hold names of layers and optimizers,
    which Keras numbers in the order of their creation, and rank 0 may have created more of them.
    """

    def __init__(
        self,
        *,
        process_set: Any = hvd.global_process_set,
        op: Any = hvd.Sum,
        device_dense: str = "",
        device_sparse: str = "",
    ) -> None:
        """Join a process set.

        Args:
            process_set: the ranks that take part; Horovod's own default is all.
            op: ``hvd.Sum``, or ``hvd.Adasum`` for Horovod's adaptive summation.
            device_dense, device_sparse: TensorFlow devices of ``all_reduce`` and ``all_gather``; empty: it chooses.
        """
        super().__init__(_read_world(), hvd)
        self._process_set, self._op = process_set, op
        self._device_dense, self._device_sparse = device_dense, device_sparse

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, ordered: bool = False, read_only: bool = False
    ) -> Totals:
        del ordered, read_only  # as in HorovodCollective
        options = {
            "op": self._op,
            "process_set": self._process_set,
            "device_dense": self._device_dense,
            "name": _last_part(name),
            "ignore_name_scope": True,
        }
        if len(tensors) == 1:
            return Totals([hvd.allreduce(tensors[0], **options)])
        return Totals(hvd.grouped_allreduce(list(tensors), **options))

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        with tf.device(self._device_sparse):
            return hvd.allgather(tensor, name=_last_part(name), ignore_name_scope=True, process_set=self._process_set)


def unique_name(prefix: str) -> str:
    """A name for the collectives of one call, unlike that of any other call in the same function.

    It counts the calls while a tf.function is traced, which every rank does in the same order. It counts anew with each
    trace: a rank whose variables are created within the first one traces twice. Eagerly, where one operation ends
    before the next begins, it is the prefix.
    """
    if tf.executing_eagerly():
        return prefix
    graph = tf.compat.v1.get_default_graph()
    while type(graph).__name__ in BRANCH_GRAPHS:
        graph = graph.outer_graph
    uses = _uses.setdefault(graph, collections.Counter())
    uses[prefix] += 1
    return f"{prefix}_{uses[prefix]}"


def require_init(what: str) -> None:
    """Raise where Horovod has not been started.

    Raises:
        UsageError: ``hvd.init()`` was not called.
    """
    if not hvd.is_initialized():
        raise UsageError(
            f"{what} needs to know the ranks, and Horovod is not initialized. Call ringtrain.keras.init() first: right "
            "after the imports, before TensorFlow computes anything.",
            reach="run",
        )


def _last_part(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def _read_world() -> World:
    return World(
        rank=hvd.rank(),
        size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
        node=socket.gethostname(),
        launcher="Horovod",
    )
