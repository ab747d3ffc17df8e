"""One process: every collective is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringtrain.collectives.base import Collective, Totals
from ringtrain.runtime.world import World

if TYPE_CHECKING:
    import tensorflow as tf


class Solo(Collective):
    """The collective of a run of one process."""

    description = "none (one process)"

    def __init__(self, world: World) -> None:
        self.world = world

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, ordered: bool = False, read_only: bool = False
    ) -> Totals:
        return Totals(list(tensors))

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        return tensor

    def broadcast(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return list(tensors)
