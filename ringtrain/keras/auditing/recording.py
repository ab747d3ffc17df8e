"""Record what a step reduces, applies and writes. The step must run eagerly."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from ringtrain.collectives.context import alone
from ringtrain.keras.distributed import Distributed
from ringtrain.keras.exchange import Exchange, Settings, variable_key
from ringtrain.keras.guards import read_rate

Plain = Callable[..., Any]  # a replaced method
# In one process, a sum, mean or gather over ranks is the value itself.
COLLECTIVES_OF_ONE = {
    "size": lambda: 1,
    "rank": lambda: 0,
    "allreduce": lambda tensor, *args, **kwargs: tensor,
    "allgather": lambda tensor, *args, **kwargs: tensor,
    "broadcast": lambda tensor, *args, **kwargs: tensor,
}


@dataclass
class Recording:
    """One call of a step; mappings are by key of variable."""

    variables: dict[Hashable, Any] = field(default_factory=dict)  # whose gradients were reduced or applied
    written: dict[Hashable, Any] = field(default_factory=dict)
    local: dict[Hashable, Any] = field(default_factory=dict)  # this rank's gradients, before their reduction
    applied: dict[Hashable, Any] = field(default_factory=dict)  # gradients that an optimizer got
    settings: list[Settings] = field(default_factory=list)
    passes: int = 1  # of backward_passes_per_step
    has_own_layers: bool = False  # PartialDistributedOptimizer
    not_distributed: list[str] = field(default_factory=list)  # optimizers
    optimizers: dict[int, Any] = field(default_factory=dict)
    loss_scale: float = 1.0
    models: dict[int, keras.Model] = field(default_factory=dict)
    rates: list[float | None] = field(default_factory=list)  # of each update
    num_updates: int = 0  # of the optimizer with the most
    is_in_graph: bool = False

    def all_variables(self) -> dict[Hashable, Any]:
        """Return all that a step may change."""
        slots = [variable for optimizer in self.optimizers.values() for variable in optimizer.variables]
        return self.variables | self.written | {variable_key(variable): variable for variable in slots}

    def layers(self) -> list[keras.layers.Layer]:
        return list({id(each): each for model in self.models.values() for each in model._flatten_layers()}.values())

    def why_not_audited(self) -> str:
        if self.is_in_graph:
            return "the step runs in a graph although functions run eagerly, such as in a map or a while_loop"
        if self.num_updates > 1:
            return f"an optimizer updates {self.num_updates} times in one call of the step"
        if self.passes > 1:
            return f"backward_passes_per_step is {self.passes}, and not every step reduces gradients"
        if self.has_own_layers:
            return "it has local layers, which differ between ranks"
        if any(each.op == hvd.Adasum or each.process_set != hvd.global_process_set for each in self.settings):
            return "op=hvd.Adasum and process sets have no counterpart in one process"
        return ""


@contextlib.contextmanager
def recording(*, is_one_process: bool = False) -> Iterator[Recording]:
    """Record until the end of the block. ``is_one_process``: communicate nothing, as if there was one rank."""
    record = Recording()
    counts: dict[int, int] = {}

    def reduce(plain: Plain, exchange: Exchange, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        for gradient, variable in zip(gradients, variables, strict=True):
            key = variable_key(variable)
            record.variables[key] = variable
            if gradient is not None and key not in record.local:  # an optimizer may pass on a tape's gradients
                record.local[key] = gradient
            record.has_own_layers |= exchange.is_local(variable)
        record.settings.append(exchange.settings)
        record.passes = max(record.passes, exchange.accumulation.passes if exchange.accumulation else 1)
        return list(gradients) if is_one_process else plain(exchange, gradients, variables)

    def apply(plain: Plain, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        given = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
        record.is_in_graph |= not tf.executing_eagerly()
        record.rates.append(read_rate(optimizer) if tf.executing_eagerly() else None)
        counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1
        record.num_updates = max(counts.values())
        keys = [variable_key(variable) for variable in given]
        record.variables |= dict(zip(keys, given, strict=True))
        record.applied |= {key: gradient for key, gradient in zip(keys, grads, strict=True) if gradient is not None}
        if not (isinstance(optimizer, Distributed) or any(key in record.local for key in keys)):
            record.not_distributed.append(f"{optimizer.name} ({type(optimizer).__name__})")
        record.optimizers[id(optimizer)] = optimizer
        return plain(optimizer, grads, trainable_variables)

    def apply_outer(plain: Plain, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """LossScaleOptimizer and MultiOptimizer, around others."""
        record.optimizers[id(optimizer)] = optimizer
        if hasattr(optimizer, "dynamic_scale"):
            record.loss_scale = float(optimizer.dynamic_scale) if optimizer.built else optimizer.initial_scale
        for inner in [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", [])]:
            if inner is not None:
                record.optimizers[id(inner)] = inner
        return plain(optimizer, *args, **kwargs)

    def call(plain: Plain, layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        if isinstance(layer, keras.Model):
            record.models[id(layer)] = layer
        return plain(layer, *args, **kwargs)

    def assign(plain: Plain, variable: Any, *args: Any, **kwargs: Any) -> Any:
        record.written[variable.ref()] = variable
        return plain(variable, *args, **kwargs)

    variable_class = next(each for each in type(tf.Variable(0.0)).__mro__ if "assign" in vars(each))
    names = ("LossScaleOptimizer", "MultiOptimizer")  # the second since Keras 3.15
    outer = [getattr(keras.optimizers, name) for name in names if hasattr(keras.optimizers, name)]
    patches: list[tuple[Any, str, Plain]] = [
        (Exchange, "reduce", reduce),
        (keras.optimizers.Optimizer, "apply", apply),
        *((optimizer_class, "apply", apply_outer) for optimizer_class in outer),
        (keras.layers.Layer, "__call__", call),
        *((variable_class, name, assign) for name in ("assign", "assign_add", "assign_sub")),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, around in patches:
            stack.enter_context(replaced(owner, name, around))
        if is_one_process:
            stack.enter_context(without_ranks())
        yield record


@contextlib.contextmanager
def without_ranks() -> Iterator[None]:
    """Let the script see one rank until the end of the block."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(alone())
        for interface in (hvd, sys.modules[__name__.partition(".auditing")[0]]):
            for name, value in COLLECTIVES_OF_ONE.items():
                stack.callback(setattr, interface, name, getattr(interface, name))
                setattr(interface, name, value)
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Replace a method by ``around(plain, self, ...)`` until the end of the block."""
    is_own, plain = name in vars(owner), getattr(owner, name)

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(plain, self, *args, **kwargs)

    setattr(owner, name, method)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, plain)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
