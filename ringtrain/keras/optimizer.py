"""Optimizers that reduce the gradients of all ranks before they update anything.

``DistributedOptimizer`` turns the optimizer that it is given into one of a subclass, whose ``apply`` reduces first.
Whatever that optimizer is and holds (slots, exclusions from weight decay, a restored state) stays as it is, and so do
clipping, moving averages and accumulation, which act on the reduced gradients.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from ringtrain.errors import UsageError
from ringtrain.keras.exchange import Accumulation, Exchange, Settings, find_local_variables

# Whether this is within the ``apply`` of a distributed optimizer, whose parts, where it has such (MultiOptimizer,
# LossScaleOptimizer), apply what it has reduced.
is_applying = contextvars.ContextVar("is_applying", default=False)


class Distributed:
    """What a distributed optimizer has beyond its Keras class, which stands behind this one among the bases."""

    _settings: ClassVar[Settings]
    _accumulation: ClassVar[tuple[int, bool]]  # passes to a reduction, whether their gradients are averaged
    _plain_class: ClassVar[type[keras.optimizers.Optimizer]]

    @property  # type: ignore[misc]
    def __class__(self) -> type[keras.optimizers.Optimizer]:
        """The Keras class: under this name, and no other, Keras saves the optimizer, so that plain Keras loads it."""
        return self._plain_class

    @functools.cached_property
    def _agg_helper(self) -> Accumulation | None:
        """Gradients added up so far; None where every pass is reduced. (Upstream's name.)"""
        passes, averages = self._accumulation
        return Accumulation(passes, averages=averages) if passes > 1 else None

    @functools.cached_property
    def exchange(self) -> Exchange:
        """What reduces this optimizer's gradients."""
        return Exchange(self._settings, self._agg_helper)

    def register_local_var(self, var: Any) -> None:
        """Keep the gradients of a variable on this rank."""
        self.exchange.register_local(var)

    def compute_gradients(self, loss: Any, var_list: Sequence[Any], tape: tf.GradientTape | None = None) -> list[Any]:
        """Reduced gradients with their variables, for ``apply_gradients``, which does not reduce them again.

        Args:
            loss: a tensor recorded by ``tape``, or a function that computes it.
            var_list: the variables.
            tape: what recorded ``loss``.
        """
        if callable(loss):
            tape = tape or tf.GradientTape()
            with tape:
                loss = loss()
        if tape is None:
            raise UsageError("compute_gradients needs the tape that recorded the loss: pass tape=...", reach="run")
        gradients = self.exchange.reduce(tape.gradient(loss, list(var_list)), var_list)
        self.exchange.remember(gradients)
        return list(zip(gradients, var_list, strict=True))

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce the gradients of all ranks and apply them."""
        apply_here: Callable[..., None] = super().apply  # type: ignore[misc]
        before = is_applying.set(True)
        try:
            if self.__dict__.get("_takes_reduced"):
                apply_here(grads, trainable_variables)
            else:
                apply_reduced(self, self, apply_here, grads, trainable_variables)
        finally:
            is_applying.reset(before)

    @contextlib.contextmanager
    def taking_reduced(self) -> Iterator[None]:
        """Within this, ``apply`` takes gradients that are reduced already."""
        self.__dict__["_takes_reduced"] = True
        try:
            yield
        finally:
            self.__dict__["_takes_reduced"] = False


def apply_reduced(
    distributed: Distributed,
    optimizer: keras.optimizers.Optimizer,
    apply: Callable[..., None],
    gradients: Sequence[Any],
    variables: Sequence[Any] | None,
) -> None:
    """Reduce gradients by ``distributed``, and apply them once they are complete.

    Args:
        distributed: what reduces.
        optimizer: what applies: the same, or the ``LossScaleOptimizer`` around it, which must test the reduced
            gradients for overflow, since ranks that test their own would part ways there.
        apply: its own ``apply``.
    """
    if variables is None:
        variables = optimizer._trainable_variables
    variables = list(variables)
    if not gradients:
        return
    reduced = distributed.exchange.reduce(gradients, variables)
    accumulation = distributed._agg_helper
    if accumulation is None:
        apply(reduced, variables)
        return
    if not optimizer.built:
        optimizer.build(variables)

    def update() -> tf.Tensor:
        apply(reduced, variables)
        return tf.constant(True)

    def only_count() -> tf.Tensor:
        optimizer.iterations.assign_add(1)
        return tf.constant(False)

    tf.cond(accumulation.is_complete(), update, only_count)


def DistributedOptimizer(  # noqa: N802 (upstream's name)
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Make an optimizer reduce the gradients of all ranks before it applies them.

    Args:
        optimizer: a Keras optimizer. It is this very object that reduces from now on, and that is returned.
        name: prefix of the operations' names; ``"Distributed"`` and the optimizer's class by default.
        device_dense, device_sparse: TensorFlow devices for the reduction of dense and of sparse gradients.
        compression: ``hvd.Compression.none``, or ``fp16`` to send gradients as float16.
        sparse_as_dense: whether to make sparse gradients dense first.
        gradient_predivide_factor: f splits Average's division by n: by f before the sum, by n/f after it.
        op: ``hvd.Average`` (the gradient of the mean of the ranks' losses), ``hvd.Sum`` or ``hvd.Adasum``.
        backward_passes_per_step: calls whose gradients are added up on each rank before they are reduced and applied.
        average_aggregated_gradients: whether to divide that sum by their number.
        num_groups: the old name of ``groups``.
        groups: how many groups of gradients travel together, or which (lists of variables); by default, a few that
            leave while the backward pass goes on.
        process_set: the ranks that train together.
        scale_local_gradients: whether to divide the gradients of local variables by the number of ranks, which makes
            their step what it would be in the average.

    Raises:
        UsageError: an argument is wrong; ``hvd.init()`` was not called; the optimizer is distributed already.
    """
    from ringtrain.keras import hooks  # which knows this module

    _check_optimizer(optimizer, backward_passes_per_step)
    plain_class = type(optimizer)
    settings = Settings(
        name=name or f"Distributed{plain_class.__name__}",
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    attributes = {
        "_settings": settings,
        "_accumulation": (backward_passes_per_step, average_aggregated_gradients),
        "_plain_class": plain_class,
        "__module__": plain_class.__module__,
    }
    hooks.install()
    object.__setattr__(optimizer, "__class__", type(plain_class.__name__, (Distributed, plain_class), attributes))
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802 (upstream's name)
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = hvd.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """``DistributedOptimizer``, but for some layers, which each rank trains on its own.

    Args:
        local_layers: a layer, or a list of layers, whose gradients stay on their rank. They must be built.
    """
    local_variables = find_local_variables(local_layers)
    distributed = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in local_variables:
        distributed.register_local_var(variable)
    return distributed


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type[keras.optimizers.Optimizer]] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a saved model, whose optimizer goes on where it was, distributed.

    Args:
        filepath: a file that ``model.save`` wrote, with or without a distributed optimizer. Code in it (a ``Lambda``)
            is refused, not run.
        custom_optimizers: optimizer classes of your own that the file names.
        custom_objects: other classes and functions that it names.
        compression: as for ``DistributedOptimizer``.
        legacy_opts: of Keras 2; must be False.
    """
    if legacy_opts:
        raise UsageError("legacy_opts=True, but Keras 3 has no legacy optimizers. Leave it out.", reach="run")
    objects = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects, safe_mode=True)
    if model.optimizer is not None:
        DistributedOptimizer(getattr(model.optimizer, "inner_optimizer", model.optimizer), compression=compression)
    return model


def find_distributed(optimizer: Any) -> Distributed | None:
    """The distributed optimizer in this one: itself, or the one that a LossScaleOptimizer scales for."""
    candidates = (optimizer, getattr(optimizer, "inner_optimizer", None))
    return next((candidate for candidate in candidates if isinstance(candidate, Distributed)), None)


def check_parts(optimizer: Any) -> None:
    """See that no part of a ``MultiOptimizer`` reduces by itself: the others would train each rank's model apart.

    Raises:
        UsageError: one does.
    """
    names = [part.name for part in getattr(optimizer, "optimizers", ()) if find_distributed(part) is not None]
    if names:
        raise UsageError(
            f"the optimizer {optimizer.name!r} holds optimizers that are distributed by themselves "
            f"({', '.join(names)}). Distribute it as a whole, and none of its parts: "
            "hvd.DistributedOptimizer(keras.optimizers.MultiOptimizer(...)).",
            reach="run",
        )


def _check_optimizer(optimizer: Any, backward_passes_per_step: int) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        remedy = f"keras.optimizers.get({optimizer!r})" if isinstance(optimizer, str) else "keras.optimizers.Adam(1e-3)"
        raise UsageError(
            f"optimizer={optimizer!r} must be an optimizer of Keras 3, not {type(optimizer).__name__}. Pass one, such "
            f"as {remedy}.",
            reach="run",
        )
    if find_distributed(optimizer) is not None:
        raise UsageError(
            f"the optimizer {optimizer.name!r} is distributed already. Use it as it is: wrapped twice, its gradients "
            "would be reduced twice.",
            reach="run",
        )
    check_parts(getattr(optimizer, "inner_optimizer", optimizer))
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise UsageError(
            f"backward_passes_per_step={backward_passes_per_step!r} must be a whole number, at least 1.", reach="run"
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    parts = [inner, *getattr(inner, "optimizers", ())]
    accumulates = next((part.gradient_accumulation_steps for part in parts if part.gradient_accumulation_steps), None)
    if backward_passes_per_step > 1 and accumulates:
        raise UsageError(
            f"backward_passes_per_step={backward_passes_per_step} and the optimizer's gradient_accumulation_steps="
            f"{accumulates} both add up gradients. Leave one of them out.",
            reach="run",
        )
