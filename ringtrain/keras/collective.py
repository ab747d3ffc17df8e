"""Horovod over a process set, and names under which the ranks meet whatever their layers are called."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ringtrain.collectives import Totals
from ringtrain.collectives.horovod import HorovodCollective
from ringtrain.errors import NO_HOROVOD_SIGN, UsageError
from ringtrain.runtime.world import World


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


def require_init(what: str) -> None:
    """Raise where Horovod has not been started.

    Raises:
        UsageError: ``hvd.init()`` was not called.
    """
    if not hvd.is_initialized():
        raise UsageError(
            f"{what} needs to know the ranks, and {NO_HOROVOD_SIGN}. Call ringtrain.keras.init() first: right after "
            "the imports, before TensorFlow computes anything.",
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
