"""Gradient tapes that reduce the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ringtrain.errors import UsageError
from ringtrain.keras.exchange import Exchange, Settings, find_local_variables


class Distributed:
    """Mixin, before the tape's class in the bases."""

    exchange: Exchange

    def register_local_source(self, source: Any) -> None:
        self.exchange.register_local(source)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **options: Any,
    ) -> Any:
        """Return the gradients over all ranks, in the structure of ``sources``.

        Args:
            use_generic_names: ignored; Horovod's argument.
            options: further arguments of ``tf.GradientTape.gradient``.
        """
        gradients = super().gradient(target, sources, output_gradients, **options)  # type: ignore[misc]
        reduced = self.exchange.reduce(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Return (variable, gradient) pairs: of the local variables, and of all others."""
        sources = tf.nest.flatten(sources)
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients, use_generic_names), strict=True))
        return (
            [pair for pair in pairs if self.exchange.is_local(pair[0])],
            [pair for pair in pairs if not self.exchange.is_local(pair[0])],
        )


def DistributedGradientTape(  # noqa: N802 (upstream's name)
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Make a tape return the gradients over all ranks. Use a plain optimizer with it.

    Args:
        gradtape: a tape, changed in place and returned; it may have recorded already.

    The other arguments are those of ``DistributedOptimizer``.

    Raises:
        UsageError: an argument is invalid, or ``hvd.init()`` was not called.
    """
    arguments = locals() | {"name": "DistributedGradientTape"}
    if not isinstance(gradtape, tf.GradientTape) or isinstance(gradtape, Distributed):
        raise UsageError(
            f"gradtape={gradtape!r} must be a tf.GradientTape that is not distributed yet. Pass the tape itself, once."
        )
    settings = Settings.among(arguments)
    plain_class = type(gradtape)
    gradtape.__class__ = type(plain_class.__name__, (Distributed, plain_class), {})
    gradtape.exchange = Exchange(settings)
    return gradtape


def PartialDistributedGradientTape(  # noqa: N802 (upstream's name)
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = hvd.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """``DistributedGradientTape``, except for local layers.

    Args:
        local_layers: a built layer, or a list of them, whose gradients are not reduced.
    """
    arguments = locals()
    local_variables = find_local_variables(arguments.pop("local_layers"))
    tape = DistributedGradientTape(**arguments)
    for variable in local_variables:
        tape.register_local_source(variable)
    return tape
