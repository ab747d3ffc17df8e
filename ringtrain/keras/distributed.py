"""A dynamic subclass of an optimizer's Keras class, whose ``apply`` first reduces the gradients."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from ringtrain.errors import UsageError
from ringtrain.keras.exchange import Accumulation, Exchange, Settings
from ringtrain.runtime.private import weights_of_optimizer
from ringtrain.step.optimizers import FUSED_UPDATES

NAMES = ("LossScaleOptimizer", "MultiOptimizer")  # optimizers around others; the second since Keras 3.15
OUTER = tuple(getattr(keras.optimizers, name) for name in NAMES if hasattr(keras.optimizers, name))
# While reduced gradients are applied: by the optimizer, parts of a MultiOptimizer or a LossScaleOptimizer.
is_applying = contextvars.ContextVar("is_applying", default=False)


class Distributed:
    """Mixin, before the Keras class in the bases."""

    _settings: ClassVar[Settings]
    _accumulation: ClassVar[tuple[int, bool]]  # passes per reduction; average them
    _plain_class: ClassVar[type[keras.optimizers.Optimizer]]

    @property  # type: ignore[misc]
    def __class__(self) -> type[keras.optimizers.Optimizer]:
        """The Keras class: Keras saves the optimizer under its name, so that plain Keras can load it."""
        return self._plain_class

    @functools.cached_property
    def _agg_helper(self) -> Accumulation | None:
        """Accumulation; None if every pass is reduced. (Upstream's name.)"""
        passes, averages = self._accumulation
        return Accumulation(passes, averages=averages) if passes > 1 else None

    @functools.cached_property
    def exchange(self) -> Exchange:
        return Exchange(self._settings, self._agg_helper)

    def register_local_var(self, var: Any) -> None:
        self.exchange.register_local(var)

    def compute_gradients(self, loss: Any, var_list: Sequence[Any], tape: tf.GradientTape | None = None) -> list[Any]:
        """Return (reduced gradient, variable) pairs; ``loss``: a tensor recorded by ``tape``, or a function."""
        if callable(loss):
            tape = tape or tf.GradientTape()
            with tape:
                loss = loss()
        if tape is None:
            raise UsageError("compute_gradients needs the tape that recorded the loss: pass tape=...")
        gradients = self.exchange.reduce(tape.gradient(loss, list(var_list)), var_list)
        self.exchange.remember(gradients)
        return list(zip(gradients, var_list, strict=True))

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        apply_here: Callable[..., None] = super().apply  # type: ignore[misc]
        if is_applying.get():
            apply_here(grads, trainable_variables)
        else:
            apply_reduced(self, self, apply_here, grads, trainable_variables)


def distribute(optimizer: keras.optimizers.Optimizer, settings: Settings, *, passes: int, averages: bool) -> None:
    """Make this object reduce every ``passes`` calls, with a fused update if possible."""
    plain_class = type(optimizer)
    bases = [Distributed, *filter(None, [FUSED_UPDATES.get(plain_class)]), plain_class]
    attributes = {
        "_settings": settings,
        "_accumulation": (passes, averages),
        "_plain_class": plain_class,
        "__module__": plain_class.__module__,
    }
    object.__setattr__(optimizer, "__class__", type(plain_class.__name__, tuple(bases), attributes))


def apply_reduced(
    distributed: Distributed,
    optimizer: keras.optimizers.Optimizer,
    apply: Callable[..., None],
    gradients: Sequence[Any],
    variables: Sequence[Any] | None,
) -> None:
    """``optimizer``: ``distributed``, or the ``LossScaleOptimizer`` around it, whose check for overflow needs reduced
    gradients: ranks that check their own would diverge.
    """
    if not gradients:
        return
    variables = list(weights_of_optimizer(optimizer) if variables is None else variables)
    reduced = distributed.exchange.reduce(gradients, variables)
    accumulation = distributed._agg_helper

    def update() -> tf.Tensor:
        before = is_applying.set(True)
        try:
            apply(reduced, variables)
        finally:
            is_applying.reset(before)
        return tf.constant(True)

    def only_count() -> tf.Tensor:
        optimizer.iterations.assign_add(1)
        return tf.constant(False)

    if accumulation is None:
        update()
        return
    if not optimizer.built:
        optimizer.build(variables)
    tf.cond(accumulation.is_complete(), update, only_count)


def find_distributed(optimizer: Any) -> Distributed | None:
    candidates = (optimizer, getattr(optimizer, "inner_optimizer", None))
    return next((candidate for candidate in candidates if isinstance(candidate, Distributed)), None)


def wrap_method(owner: type, name: str, around: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls ``around(plain, self, ...)``."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(plain, self, *args, **kwargs)

    return method


def check_parts(optimizer: Any) -> None:
    """Refuse distributed parts of a ``MultiOptimizer``: others would not be reduced."""
    names = [part.name for part in getattr(optimizer, "optimizers", ()) if find_distributed(part) is not None]
    if names:
        raise UsageError(
            f"the optimizer {optimizer.name!r} holds optimizers that are distributed by themselves "
            f"({', '.join(names)}). Distribute it as a whole, not its parts: "
            "hvd.DistributedOptimizer(keras.optimizers.MultiOptimizer(...))."
        )
