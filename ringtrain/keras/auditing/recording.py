"""Record what a step reduces, applies and computes. The step must run eagerly."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from ringtrain.keras.distributed import Distributed
from ringtrain.keras.exchange import Exchange, Settings, variable_key


@dataclass
class Recording:
    """One call of a step; mappings are by key of variable."""

    variables: dict[Hashable, Any] = field(default_factory=dict)  # whose gradients were reduced or applied
    local: dict[Hashable, Any] = field(default_factory=dict)  # this rank's gradients, before their reduction
    applied: dict[Hashable, Any] = field(default_factory=dict)  # gradients that an optimizer got
    kept_local: set[Hashable] = field(default_factory=set)  # of layers that are this rank's own, as the script says
    settings: list[Settings] = field(default_factory=list)
    passes: int = 1  # of backward_passes_per_step
    alone: list[str] = field(default_factory=list)  # optimizers without a wrapper
    optimizers: dict[int, Any] = field(default_factory=dict)
    models: dict[int, keras.Model] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)  # that fit computed
    num_updates: int = 0  # of the optimizer with the most
    is_in_graph: bool = False

    def all_variables(self) -> list[Any]:
        """All that a step may change."""
        found = dict(self.variables)
        for owner in (*self.models.values(), *self.optimizers.values()):
            more = [*owner.variables, *(owner.metrics_variables if isinstance(owner, keras.Model) else ())]
            found |= {variable_key(variable): variable for variable in more}
        return list(found.values())

    def layers(self) -> list[keras.layers.Layer]:
        return list({id(each): each for model in self.models.values() for each in model._flatten_layers()}.values())


@contextlib.contextmanager
def recording(*, is_alone: bool = False) -> Iterator[Recording]:
    """Record until the end of the block. ``is_alone``: reduce nothing, and let the script see one rank."""
    record = Recording()
    counts: dict[int, int] = {}

    def reduce(
        plain: Callable[..., Any], exchange: Exchange, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> Any:
        for gradient, variable in zip(gradients, variables, strict=True):
            key = variable_key(variable)
            record.variables[key] = variable
            if gradient is not None and key not in record.local:  # an optimizer may pass on a tape's gradients
                record.local[key] = gradient
            if exchange.is_local(variable):
                record.kept_local.add(key)
        record.settings.append(exchange.settings)
        record.passes = max(record.passes, exchange.accumulation.passes if exchange.accumulation else 1)
        return list(gradients) if is_alone else plain(exchange, gradients, variables)

    def apply(plain: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if not (hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers")):
            given = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
            record.is_in_graph |= not tf.executing_eagerly()
            counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1
            record.num_updates = max(counts.values())
            for gradient, variable in zip(grads, given, strict=True):
                record.variables[variable_key(variable)] = variable
                if gradient is not None:
                    record.applied[variable_key(variable)] = gradient
            is_reduced = any(variable_key(variable) in record.local for variable in given)
            if not (is_reduced or isinstance(optimizer, Distributed)):
                record.alone.append(f"{optimizer.name} ({type(optimizer).__name__})")
        record.optimizers[id(optimizer)] = optimizer
        return plain(optimizer, grads, trainable_variables)

    def call(plain: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        if isinstance(layer, keras.Model):
            record.models[id(layer)] = layer
        return plain(layer, *args, **kwargs)

    def compute_loss(plain: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        loss = plain(model, *args, **kwargs)
        record.losses.append(loss)
        return loss

    with contextlib.ExitStack() as stack:
        for owner, name, around in (
            (Exchange, "reduce", reduce),
            (keras.optimizers.Optimizer, "apply", apply),
            (keras.layers.Layer, "__call__", call),
            (keras.Model, "compute_loss", compute_loss),
        ):
            stack.enter_context(replaced(owner, name, around))
        if is_alone:  # a loss may divide by it
            hvd = sys.modules[__name__.partition(".auditing")[0]]
            stack.callback(setattr, hvd, "size", hvd.size)
            hvd.size = lambda: 1  # type: ignore[attr-defined]
        yield record


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
