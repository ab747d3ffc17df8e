"""Record what a step reduces, applies and writes. The step must run eagerly."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from ringtrain.collectives.context import alone
from ringtrain.collectives.gradients import merge_repeated_rows
from ringtrain.keras.distributed import OUTER, Distributed, wrap_method
from ringtrain.keras.exchange import Exchange, variable_key
from ringtrain.keras.exchanged_tensors import Reduced
from ringtrain.keras.guards import read_rate
from ringtrain.runtime.private import all_layers, weights_of_optimizer

Plain = Callable[..., Any]  # a replaced method
# Of one process. Those of ringtrain.keras find out by themselves that it is alone.
COLLECTIVES_OF_ONE: dict[str, Any] = {
    **dict.fromkeys(  # in one process, a sum, mean or gather over ranks is the value itself
        (
            "allgather",
            "allreduce",
            "broadcast",
            "broadcast_object",
            "grouped_allgather",
            "grouped_allreduce",
            "grouped_reducescatter",
            "reducescatter",
        ),
        lambda value, *args, **kwargs: value,
    ),
    "alltoall": lambda value, splits=None, *args, **kwargs: value if splits is None else (value, splits),
    "allgather_object": lambda value, *args, **kwargs: [value],
}
NUMBERS_OF_ONE: dict[str, Any] = {
    **dict.fromkeys(("size", "local_size", "cross_size"), lambda: 1),
    **dict.fromkeys(("rank", "local_rank", "cross_rank"), lambda: 0),
    **dict.fromkeys(("size_op", "local_size_op"), lambda *args, **kwargs: tf.constant(1)),
    **dict.fromkeys(("rank_op", "local_rank_op"), lambda *args, **kwargs: tf.constant(0)),
}


@dataclass
class Recording:
    """Calls of a step until it reduces; mappings are by key of variable."""

    variables: dict[Hashable, Any] = field(default_factory=dict)  # whose gradients were reduced or applied
    written: dict[Hashable, Any] = field(default_factory=dict)
    local: dict[Hashable, Any] = field(default_factory=dict)  # this rank's gradients, before their reduction
    raw: dict[Hashable, Any] = field(default_factory=dict)  # this rank's gradients, as tapes computed them
    applied: dict[Hashable, Any] = field(default_factory=dict)  # gradients that an optimizer got
    exchanges: list[Exchange] = field(default_factory=list)
    reduces: bool = False  # by an operation of ringtrain.keras, such as ``allreduce``
    has_own_layers: bool = False  # PartialDistributedOptimizer
    not_distributed: list[str] = field(default_factory=list)  # optimizers
    optimizers: list[Any] = field(default_factory=list)
    loss_scale: float = 1.0
    called: dict[int, keras.layers.Layer] = field(default_factory=dict)
    rates: list[float | None] = field(default_factory=list)  # of each update
    updates: collections.Counter[int] = field(default_factory=collections.Counter)  # by optimizer
    is_in_graph: bool = False

    @property
    def num_updates(self) -> int:
        return max(self.updates.values(), default=0)

    @property
    def passes(self) -> int:
        return max((each.accumulation.passes for each in self.exchanges if each.accumulation), default=1)

    @property
    def is_between_passes(self) -> bool:
        return any(not each.accumulation.is_complete() for each in self.exchanges if each.accumulation)

    def forget_gradients(self) -> None:
        """Free their memory."""
        self.raw = {}
        self.local = {}
        self.applied = {}

    def all_variables(self) -> dict[Hashable, Any]:
        slots = [variable for optimizer in self.optimizers for variable in optimizer.variables]
        return self.variables | self.written | {variable_key(variable): variable for variable in slots}

    def layers(self) -> list[keras.layers.Layer]:
        return list({id(each): each for layer in self.called.values() for each in all_layers(layer)}.values())

    def why_not_audited(self) -> str:
        if self.is_in_graph:
            return "the step runs in a graph although functions run eagerly, such as in a map or a while_loop"
        if self.num_updates > 1:
            return f"an optimizer updates {self.num_updates} times in one call of the step"
        if self.has_own_layers:
            return "it has local layers, which differ between ranks"
        settings = [each.settings for each in self.exchanges]
        if any(each.op == hvd.Adasum or each.process_set != hvd.global_process_set for each in settings):
            return "op=hvd.Adasum and process sets have no counterpart in one process"
        return ""


@contextlib.contextmanager
def recording(record: Recording, *, is_one_process: bool = False) -> Iterator[None]:
    """Record until the end of the block. ``is_one_process``: communicate nothing, as if there was one rank."""

    def reduce(plain: Plain, exchange: Exchange, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        record.variables |= {variable_key(variable): variable for variable in variables}
        record.exchanges.append(exchange)
        return plain(exchange, gradients, variables)

    def reduce_now(plain: Plain, exchange: Exchange, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        factor = 1 / exchange.accumulation.passes if exchange.accumulation and exchange.accumulation.averages else 1.0
        for gradient, variable in zip(gradients, variables, strict=True):
            # An optimizer may pass on a tape's gradients.
            record.local.setdefault(variable_key(variable), tf.convert_to_tensor(gradient) * factor)
            record.has_own_layers |= exchange.is_local(variable)
        if is_one_process:
            return list(map(merge_repeated_rows, gradients))
        return plain(exchange, gradients, variables)

    def apply(plain: Plain, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        record.optimizers.append(optimizer)
        if isinstance(optimizer, OUTER):
            if hasattr(optimizer, "dynamic_scale"):
                record.loss_scale = float(optimizer.dynamic_scale) if optimizer.built else optimizer.initial_scale
            return plain(optimizer, grads, trainable_variables)
        given = weights_of_optimizer(optimizer) if trainable_variables is None else list(trainable_variables)
        keys = [variable_key(variable) for variable in given]
        record.is_in_graph |= not tf.executing_eagerly()
        record.rates.append(read_rate(optimizer) if tf.executing_eagerly() else None)
        record.updates[id(optimizer)] += 1
        record.variables |= dict(zip(keys, given, strict=True))
        if Reduced.num_calls > num_reductions:
            # The script may have reduced what its tape computed.
            record.local = {key: record.raw[key] for key in keys if key in record.raw} | record.local
        record.applied |= {key: gradient for key, gradient in zip(keys, grads, strict=True) if gradient is not None}
        if not (isinstance(optimizer, Distributed) or any(key in record.local for key in keys)):
            record.not_distributed.append(f"{optimizer.name} ({type(optimizer).__name__})")
        return plain(optimizer, grads, trainable_variables)

    def compute(plain: Plain, tape: tf.GradientTape, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = plain(tape, target, sources, *args, **kwargs)
        flat_gradients = tf.nest.flatten(gradients)
        for gradient, source in zip(flat_gradients, tf.nest.flatten(sources), strict=True):
            is_variable = isinstance(source, tf.Variable | keras.Variable)
            if is_variable and gradient is not None and tf.executing_eagerly():
                key = variable_key(source)
                dense = tf.convert_to_tensor(gradient)
                record.raw[key] = record.raw[key] + dense if key in record.raw else dense
        return gradients

    def call(plain: Plain, layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        record.called[id(layer)] = layer
        return plain(layer, *args, **kwargs)

    def assign(plain: Plain, variable: Any, *args: Any, **kwargs: Any) -> Any:
        record.written[variable.ref()] = variable
        return plain(variable, *args, **kwargs)

    num_reductions = Reduced.num_calls
    with contextlib.ExitStack() as stack:
        patches: list[tuple[Any, str, Plain]] = [
            (Exchange, "reduce", reduce),
            (Exchange, "_reduce_now", reduce_now),
            *((each, "apply", apply) for each in (keras.optimizers.Optimizer, *OUTER)),
            (tf.GradientTape, "gradient", compute),
            (keras.layers.Layer, "__call__", call),
            *((_variable_class(), name, assign) for name in ("assign", "assign_add", "assign_sub")),
        ]
        for patch in patches:
            stack.enter_context(replaced(*patch))
        if is_one_process:
            stack.enter_context(alone())
            ours = sys.modules[__name__.partition(".auditing")[0]]
            stack.enter_context(mock.patch.multiple(hvd, **COLLECTIVES_OF_ONE, **NUMBERS_OF_ONE))
            stack.enter_context(mock.patch.multiple(ours, **NUMBERS_OF_ONE))
        yield
        record.reduces |= Reduced.num_calls > num_reductions


@functools.cache
def _variable_class() -> type:
    return next(each for each in type(tf.Variable(0.0)).__mro__ if "assign" in vars(each))


def replaced(owner: Any, name: str, around: Plain) -> Any:
    """Replace a method by ``around(plain, self, ...)`` until the end of the block."""
    return mock.patch.object(owner, name, wrap_method(owner, name, around))


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
