"""One process: every collective is the identity."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringtrain.collectives.base import Totals
from ringtrain.runtime.world import World

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True)
class Solo:
    """The collective of a run of one process."""

    world: World
    description: str = "none (one process)"
    overlaps_compute: bool = True

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, ordered: bool = False, read_only: bool = False
    ) -> Totals:
        return Totals(list(tensors))

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        return tensor

    def broadcast(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return list(tensors)

    def start_timeline(self, path: str) -> None:
        """There is nothing to write down."""

    def stop_timeline(self) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self, exit_code: int) -> None:
        os._exit(exit_code)
