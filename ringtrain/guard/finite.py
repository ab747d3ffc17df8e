"""Finite check before a save: finite gradients can still make weights non-finite."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import tensorflow as tf

from ringtrain.collectives import Collective, raise_on_all_ranks
from ringtrain.errors import DivergedError


def require_finite_values(
    variables: Mapping[str, keras.Variable],
    collective: Collective,
    *,
    step: int,
    though: str = ", though its loss and gradients were",
    remedy: str = "Lower --optimizer.lr, or add --optimizer.clip_global_norm",
) -> None:
    """Raise DivergedError on all ranks. Collective."""

    def look() -> None:
        if not _are_finite([variable.value for variable in variables.values()]):
            bad = [name for name, variable in variables.items() if not _is_finite(variable.value)]
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise DivergedError(
                f"after step {step} not all values of {bad[0]}{more} are finite{though}; nothing is saved of it. "
                f"{remedy}; what was saved before is whole."
            )

    raise_on_all_ranks(collective, look, name="finite_values")


@tf.function(autograph=False)
def _are_finite(values: list[tf.Tensor]) -> tf.Tensor:
    """Check in one call, to be fast: bool []."""
    return tf.reduce_all([_is_finite(value) for value in values])


def _is_finite(value: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(value)) if tf.as_dtype(value.dtype).is_floating else tf.constant(True)
