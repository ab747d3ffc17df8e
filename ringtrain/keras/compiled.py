"""``compile(jit_compile=True)``: XLA compiles a step's forward and backward pass, not the sums and the update."""

from __future__ import annotations

import functools
import logging
from typing import Any

import horovod.tensorflow as hvd

from ringtrain.step.compiled import CompiledFunction
from ringtrain.step.local_gradients import with_known_rows

log = logging.getLogger("ringtrain")


class CompiledStep:
    def __init__(self, model: Any) -> None:
        self._model, self._plain = model, model.train_step
        self._function = CompiledFunction(self._compute)
        self._why_not: str | None = None

    def __call__(self, data: Any) -> Any:
        if self._why_not is None:
            self._why_not = self._function.why_not(data)
            if self._why_not:
                notice(f"XLA has no way to compile {self._why_not}")
        if self._why_not:
            return self._plain(data)
        found, metrics = self._function(data)
        weights = self._model.trainable_weights
        self._model.optimizer.apply(list(map(with_known_rows, found, weights)), weights)
        return metrics

    def _compute(self, data: Any) -> tuple[list[Any], Any]:
        """Return gradients, captured from the optimizer, and metrics."""
        optimizer, found = self._model.optimizer, list[Any]()
        optimizer.apply = lambda gradients, variables=None: found.extend(gradients)
        try:
            metrics = self._plain(data)
        finally:
            del optimizer.apply
        return found, metrics


def why_not_compiled(model: Any) -> str:
    if "train_step" in vars(model) or not type(model).train_step.__module__.startswith("keras."):
        return f"{type(model).__name__} has its own train_step, in which ranks may sum"
    if any(getattr(layer, "needs_every_rank", False) for layer in model._flatten_layers()):
        return "a layer asks the other ranks within its forward pass"
    return ""


@functools.cache
def notice(why_not: str) -> None:
    if hvd.rank() == 0:
        log.warning(
            "ringtrain.keras: the training step runs without XLA: %s. Pass jit_compile=False to compile() to say so "
            "yourself.",
            why_not,
        )
