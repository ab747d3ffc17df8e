"""Sharded updates (ZeRO stage 1, Rajbhandari et al. 2020).

Each rank holds slots for, and updates, its pieces of the weights. Reduce-scatter of gradients and all-gather of weights
move as many bytes as one all-reduce. If a node's ranks read one shared sum, that is the reduce-scatter.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from ringtrain.collectives.differentiable import prevent_constant_folding
from ringtrain.collectives.gradients import GradientReduction, Reduced, check_finite
from ringtrain.collectives.groups import GradientSpec

# Values: slices aligned to 64 bytes need no copy in TensorFlow.
ALIGNED = 16


class Piece(NamedTuple):
    """One rank's range of a flattened tensor."""

    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


def plan_pieces(lengths: Sequence[int], size: int) -> list[list[Piece]]:
    """Divide concatenated vectors equally: pieces ``[ranks][tensors]``, aligned to ``ALIGNED`` values."""
    starts = list(itertools.accumulate(lengths, initial=0))

    def cut_near(position: int) -> int:
        tensor = bisect.bisect_right(starts, position, hi=len(lengths)) - 1
        within = round((position - starts[tensor]) / ALIGNED) * ALIGNED
        return min(starts[tensor] + within, starts[tensor + 1])

    cuts = [0, *(cut_near(starts[-1] * rank // size) for rank in range(1, size)), starts[-1]]
    return [
        [
            Piece(*(min(max(cut - start, 0), length) for cut in of_rank))
            for start, length in zip(starts, lengths, strict=False)
        ]
        for of_rank in itertools.pairwise(cuts)
    ]


def cut(tensor: tf.Tensor, piece: Piece) -> tf.Tensor:
    if not piece.length:
        return tf.zeros([0], tensor.dtype)
    vector = tf.reshape(tensor, [-1])
    return vector if piece.length == tensor.shape.num_elements() else vector[piece.begin : piece.end]


@dataclass(frozen=True, kw_only=True)
class ShardedReduction:
    """Reduces gradients (all dense, of ``shapes`` and ``dtypes``) to each rank's pieces, and gathers pieces."""

    reduction: GradientReduction
    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[str]
    control_dtype: str

    @functools.cached_property
    def specs(self) -> list[GradientSpec]:
        sizes = [
            math.prod(shape) * tf.as_dtype(dtype).size for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        return [GradientSpec(size, dtype, False) for size, dtype in zip(sizes, self.dtypes, strict=True)]

    @functools.cached_property
    def is_single_message(self) -> bool:
        return self.reduction.is_single_message([*self.specs, GradientSpec(0, self.control_dtype, False)])

    @functools.cached_property
    def groups(self) -> list[list[int]]:
        """Gradients of one type each."""
        if not self.is_single_message:
            return self.reduction.plan_groups(self.specs)
        return [[i for i, each in enumerate(self.dtypes) if each == dtype] for dtype in dict.fromkeys(self.dtypes)]

    @functools.cached_property
    def pieces(self) -> list[list[Piece]]:
        """``[ranks][tensors]``, in the gradients' order."""
        world_size = self.reduction.collective.world.size
        pieces = [[Piece(0, 0)] * len(self.specs) for _ in range(world_size)]
        for group in self.groups:
            lengths = [math.prod(self.shapes[index]) for index in group]
            for rank, of_rank in enumerate(plan_pieces(lengths, world_size)):
                for index, piece in zip(group, of_rank, strict=True):
                    pieces[rank][index] = piece
        return pieces

    @property
    def own(self) -> list[Piece]:
        return self.pieces[self.reduction.collective.world.rank]

    def __call__(self, gradients: Sequence[tf.Tensor], control: tf.Tensor, state: Sequence[tf.Tensor] = ()) -> Reduced:
        """Return this rank's pieces as gradients [n]."""
        if self.is_single_message:
            reduced = self.reduction.all_reduce_fused(gradients, control, state)
            return reduced._replace(gradients=list(map(cut, reduced.gradients, self.own)))
        summed_state = self.reduction.sum_state(state)
        collective, name = self.reduction.collective, self.reduction.name
        [control] = collective.all_reduce([control], name="control")
        mine = list(gradients)
        for number, group in enumerate(self.groups):
            parts = self._reduce_scatter(group, [gradients[i] for i in group], f"{name}/{number}")
            for index, part in zip(group, parts, strict=True):
                mine[index] = part
        is_finite, norm = check_finite(mine)
        checks = tf.stack([norm**2, tf.cast(~is_finite, norm.dtype)])
        [checks] = collective.all_reduce([prevent_constant_folding(checks)], name=f"{name}/checks")
        return Reduced(mine, tf.equal(checks[1], 0), tf.sqrt(checks[0]), control, summed_state)

    def _reduce_scatter(self, group: Sequence[int], gradients: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        GradientReduction.calls += 1
        lengths = [sum(of_rank[i].length for i in group) for of_rank in self.pieces]
        flat = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], axis=0)
        if len(set(lengths)) > 1:
            parts = tf.split(flat, lengths)
            flat = tf.concat([tf.pad(p, [[0, max(lengths) - n]]) for p, n in zip(parts, lengths, strict=True)], axis=0)
        mine = self.reduction.collective.reduce_scatter(self.reduction.compress(flat), name=name)
        of_mine = [self.own[i].length for i in group]
        return tf.split(tf.cast(mine[: sum(of_mine)], flat.dtype), of_mine)

    def all_gather(self, mine: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        collective, begins = self.reduction.collective, [piece.begin for piece in self.own]
        gathered = collective.all_gather_pieces(mine, begins, self.shapes, name=name)
        if gathered is not None:
            return gathered
        whole = list(mine)
        for number, group in enumerate(self.groups):
            lengths = [math.prod(self.shapes[index]) for index in group]
            # No scope: within a condition its name may differ between ranks.
            joined = collective.all_gather(
                prevent_constant_folding(tf.concat([mine[i] for i in group], axis=0)), name=f"{name}_{number}"
            )
            vectors = tf.split(tf.ensure_shape(joined, [sum(lengths)]), lengths)
            for index, vector in zip(group, vectors, strict=True):
                whole[index] = tf.reshape(vector, self.shapes[index])
        return whole
