"""Horovod over a process set, with operation names that are equal on all ranks."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object, with_native_sums
from ringtrain.collectives.differentiable import unique_name
from ringtrain.collectives.horovod import HorovodCollective
from ringtrain.errors import NO_HOROVOD_SIGN, UsageError
from ringtrain.runtime.devices import is_on
from ringtrain.runtime.world import World

log = logging.getLogger("ringtrain")
STALL_SECONDS = 60.0  # as in Horovod's stall check
BACKENDS = ("auto", "horovod")
_backend = "auto"
_cores = ""


class ProcessSetCollective(HorovodCollective):
    """Collective over a process set.

    Names are without scopes, which contain layers and optimizers by Keras' numbers: rank 0 may have created more.
    """

    def __init__(
        self,
        *,
        process_set: Any = hvd.global_process_set,
        op: Any = hvd.Sum,
        device_dense: str = "",
        device_sparse: str = "",
    ) -> None:
        world = World(
            rank=hvd.rank(),
            size=hvd.size(),
            local_rank=hvd.local_rank(),
            local_size=hvd.local_size(),
            node=socket.gethostname(),
            launcher="Horovod",
        )
        super().__init__(world, hvd)
        self._process_set, self._op = process_set, op
        self._device_dense, self._device_sparse = device_dense, device_sparse

    @property
    def ranks(self) -> Sequence[int]:
        return self._process_set.ranks or range(self.world.size)

    def all_reduce(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        options = {
            "op": self._op,
            "process_set": self._process_set,
            "device_dense": self._device_dense,
            "name": _last_part(name),
            "ignore_name_scope": True,
        }
        if len(tensors) == 1:
            return [hvd.allreduce(tensors[0], **options)]
        return hvd.grouped_allreduce(list(tensors), **options)

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        with tf.device(self._device_sparse):
            return hvd.allgather(tensor, name=_last_part(name), ignore_name_scope=True, process_set=self._process_set)


@functools.cache
def all_ranks() -> Collective:
    """Return the collective of all ranks, native if possible. The first call is collective."""
    with tf.init_scope():
        return with_native_sums(ProcessSetCollective(), stall_seconds=STALL_SECONDS)


def wants_native_sums() -> bool:
    return _backend == "auto" and not is_elastic()


def is_elastic() -> bool:
    """True under ``horovodrun --min-np`` or ``--host-discovery-script``."""
    return is_on(os.environ.get("HOROVOD_ELASTIC", ""))


def choose_backend(backend: str) -> None:
    """Connections remain unless Horovod was shut down."""
    global _backend
    if backend not in BACKENDS:
        raise UsageError(f"backend is {backend!r}; ringtrain.keras.init() takes {' or '.join(map(repr, BACKENDS))}.")
    if backend != _backend or not hvd.is_initialized():
        all_ranks.cache_clear()
        _backend = backend


def note_cores(words: str) -> None:
    global _cores
    _cores = words


def describe_communication(carrier: Collective, why_not_native: str) -> str:
    native = f"; no sum is native: {why_not_native}" if why_not_native else ""
    return f"communication: {carrier.description}{native}{f'; {_cores}' if _cores else ''}"


def require_init(what: str) -> None:
    if not hvd.is_initialized():
        raise UsageError(
            f"{what} needs to know the ranks, and {NO_HOROVOD_SIGN}. Call ringtrain.keras.init() first: right after "
            "the imports, before TensorFlow computes anything. To train a workload: --backend auto, with Horovod."
        )


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: Any = hvd.global_process_set,
    inplace: bool = False,
) -> None:
    """Set variables to the root's values.

    Args:
        variables: of TensorFlow or Keras, in the same order on every rank.
        root_rank: source of the broadcast.
        process_set: the participating ranks.
        inplace: ignored; Horovod's argument.

    Raises:
        UsageError: number, types or shapes of the variables differ between ranks.
    """
    require_init("broadcast_variables")
    plain = [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]
    name = unique_name("broadcast_variables")
    if tf.executing_eagerly():
        require_same_kinds(plain, ProcessSetCollective(process_set=process_set), purpose="to broadcast")
    # By position: Keras numbers names in order of creation.
    for number, variable in enumerate(plain):
        value = hvd.broadcast(
            variable, root_rank, name=f"{name}_{number}", ignore_name_scope=True, process_set=process_set
        )
        variable.assign(value)


def require_same_kinds(variables: Iterable[Any], collective: ProcessSetCollective, *, purpose: str) -> None:
    """Others would deadlock, or sum unrelated values."""
    kinds = [f"{tf.as_dtype(variable.dtype).name} {list(variable.shape)}" for variable in variables]
    all_kinds = all_gather_object(collective, kinds, name="variable_kinds")
    for rank, others in zip(collective.ranks, all_kinds, strict=True):
        if others == all_kinds[0]:
            continue
        pairs = enumerate(itertools.zip_longest(all_kinds[0], others, fillvalue="nothing"))
        number, (first, other) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
        raise UsageError(
            f"rank {collective.ranks[0]} has {len(all_kinds[0])} variables {purpose}, and rank {rank} "
            f"has {len(others)}; they differ first at number {number}: {first} and {other}. Create the same "
            "model and optimizer on every rank, built from data of one shape."
        )


def _last_part(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)
