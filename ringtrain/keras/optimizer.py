"""Optimizers that reduce gradients before an update; clipping and averages act on reduced ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras

from ringtrain.errors import UsageError
from ringtrain.keras import hooks
from ringtrain.keras.distributed import check_parts, distribute, find_distributed
from ringtrain.keras.exchange import Settings, find_local_variables


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
        optimizer: a Keras optimizer, changed in place and returned.
        name: prefix of operation names; default: ``"Distributed"`` and the optimizer's class.
        device_dense, device_sparse: TensorFlow devices for the reduction of dense and sparse gradients.
        compression: ``hvd.Compression.none``, or ``fp16`` to send gradients as float16.
        sparse_as_dense: convert sparse gradients to dense first.
        gradient_predivide_factor: f; Average divides by f before the sum, by n/f after it.
        op: ``hvd.Average`` (the gradient of the mean of the ranks' losses), ``hvd.Sum`` or ``hvd.Adasum``.
        backward_passes_per_step: calls accumulated on each rank before one reduction and update.
        average_aggregated_gradients: divide that sum by the number of calls.
        num_groups: the old name of ``groups``.
        groups: number of fused groups, or lists of variables; default: a few, reduced during the backward pass.
        process_set: the ranks that train together.
        scale_local_gradients: divide local variables' gradients by the number of ranks, as the average does.

    Raises:
        UsageError: an argument is invalid; ``hvd.init()`` was not called; the optimizer is distributed already.
    """
    arguments = locals() | {"name": name or f"Distributed{type(optimizer).__name__}"}
    _check_optimizer(optimizer, backward_passes_per_step)
    settings = Settings.among(arguments)
    hooks.install()
    distribute(optimizer, settings, passes=backward_passes_per_step, averages=average_aggregated_gradients)
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
    """``DistributedOptimizer``, except for local layers, which each rank trains alone.

    Args:
        local_layers: a built layer, or a list of them, whose gradients are not reduced.
    """
    arguments = locals()
    local_variables = find_local_variables(arguments.pop("local_layers"))
    distributed = DistributedOptimizer(**arguments)
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
    """Load a saved model and distribute its optimizer.

    Args:
        filepath: written by ``model.save``. Code in it (a ``Lambda``) is refused.
        custom_optimizers: user-defined optimizer classes in it.
        custom_objects: other user-defined classes and functions in it.
        compression: as for ``DistributedOptimizer``.
        legacy_opts: of Keras 2; must be False.
    """
    if legacy_opts:
        raise UsageError("legacy_opts=True, but Keras 3 has no legacy optimizers. Leave it out.")
    objects = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects, safe_mode=True)
    if model.optimizer is not None:
        DistributedOptimizer(getattr(model.optimizer, "inner_optimizer", model.optimizer), compression=compression)
    return model


def _check_optimizer(optimizer: Any, backward_passes_per_step: int) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        remedy = f"keras.optimizers.get({optimizer!r})" if isinstance(optimizer, str) else "keras.optimizers.Adam(1e-3)"
        raise UsageError(
            f"optimizer={optimizer!r} must be an optimizer of Keras 3, not {type(optimizer).__name__}. Pass one, such "
            f"as {remedy}."
        )
    if find_distributed(optimizer) is not None:
        raise UsageError(
            f"the optimizer {optimizer.name!r} is distributed already. Use it unchanged: wrapped twice, its gradients "
            "would be reduced twice."
        )
    check_parts(getattr(optimizer, "inner_optimizer", optimizer))
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise UsageError(f"backward_passes_per_step={backward_passes_per_step!r} must be a whole number, at least 1.")
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    parts = [inner, *getattr(inner, "optimizers", ())]
    accumulates = next((part.gradient_accumulation_steps for part in parts if part.gradient_accumulation_steps), None)
    if backward_passes_per_step > 1 and accumulates:
        raise UsageError(
            f"backward_passes_per_step={backward_passes_per_step} and the optimizer's gradient_accumulation_steps="
            f"{accumulates} both add up gradients. Leave one of them out."
        )
