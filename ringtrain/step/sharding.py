"""Sharded optimizer (ZeRO-1, Rajbhandari et al. 2020): each rank has pieces of the weights and their slots.

The pieces are the optimizer's variables: vectors with the weights' names, some empty. Element-wise updates are
unchanged; norms are summed over the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives.differentiable import prevent_constant_folding
from ringtrain.collectives.gradients import GradientReduction, Reduced
from ringtrain.collectives.shards import ShardedReduction, cut
from ringtrain.errors import UsageError
from ringtrain.run.variables import slots_that_begin_as_weights
from ringtrain.runtime.private import (
    clip_as_keras,
    decay_weights_if,
    is_decayed,
    key_of_weight,
    replace_clipping,
    restore_clipping,
)
from ringtrain.step.optimizers import LayerwiseUpdate

PROBE_SHAPE, PROBE_CUT, PROBE_UPDATES = (6, 4), 10, 2
PROBE_RATE, PROBE_TOLERANCE = 0.1, 1e-5
# Not examined: optimizers that contain others, or a loss scale.
MARKS_OF_WRAPPERS = ("optimizers", "inner_optimizer")


class ShardedOptimizer:
    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        weights: Sequence[keras.Variable],
        reduction: GradientReduction,
        *,
        control_dtype: str,
    ) -> None:
        """Build the optimizer on pieces of the weights.

        Raises:
            UsageError: an update is not element-wise.
        """
        if not isinstance(optimizer, LayerwiseUpdate):
            require_elementwise(optimizer)
        self.optimizer, self._weights, self._collective = optimizer, list(weights), reduction.collective
        self._reduction = ShardedReduction(
            reduction=reduction,
            shapes=[tuple(weight.shape) for weight in weights],
            dtypes=[weight.dtype for weight in weights],
            control_dtype=control_dtype,
        )
        self.pieces: list[keras.Variable] = []
        for index, weight in enumerate(self._weights):
            cut_off = self._cut(index, weight.value)
            self.pieces.append(keras.Variable(cut_off, trainable=True, dtype=weight.dtype, name=weight.name))
            self.pieces[-1]._path = weight.path  # prefix of slot names
        # Non-empty ones; at least one, to count the update.
        self._updated = [index for index, piece in enumerate(self.pieces) if piece.shape[0]] or [0]
        self._weight_of_slot: dict[int, int] = {}
        self._build()
        self._keep_exclusions()
        if isinstance(optimizer, LayerwiseUpdate):
            optimizer.sum_over_ranks = functools.partial(self._sum, name="norms")

    def _build(self) -> None:
        """Also record the weight of each slot."""
        optimizer, add = self.optimizer, self.optimizer.add_variable_from_reference
        index_of = {key_of_weight(optimizer, piece): index for index, piece in enumerate(self.pieces)}

        @functools.wraps(add)
        def add_and_note(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
            slot = add(reference_variable, *args, **kwargs)
            self._weight_of_slot[id(slot)] = index_of[key_of_weight(optimizer, reference_variable)]
            return slot

        optimizer.add_variable_from_reference = add_and_note
        try:
            optimizer.build(self.pieces)
        finally:
            del optimizer.add_variable_from_reference
        if strange := [slot.path for slot in optimizer.variables if len(slot.shape) and not self.is_shared_out(slot)]:
            name = type(optimizer).__name__
            raise UsageError(
                f"shard_optimizer is true, but {name} has a variable ({strange[0]}) that is neither one number nor "
                "made by add_variable_from_reference, so it is not known which weight it is of. Make it so, or leave "
                "--shard_optimizer out."
            )

    def _keep_exclusions(self) -> None:
        """Exclude pieces from weight decay by the names of their weights, which exclusions match."""
        optimizer = self.optimizer
        is_decayed_by_key = {}
        for piece, weight in zip(self.pieces, self._weights, strict=True):
            is_decayed_by_key[key_of_weight(optimizer, piece)] = is_decayed(optimizer, weight)
        decay_weights_if(optimizer, lambda variable: is_decayed_by_key[key_of_weight(optimizer, variable)])

    def _cut(self, index: int, value: Any) -> Any:
        return cut(tf.convert_to_tensor(value), self._reduction.own[index])

    def is_shared_out(self, slot: keras.Variable) -> bool:
        """False for slots that all ranks have, such as the number of updates."""
        return id(slot) in self._weight_of_slot

    def shape_of(self, slot: keras.Variable) -> tuple[int, ...]:
        return tuple(self._weights[self._weight_of_slot[id(slot)]].shape)

    def reduce(
        self, gradients: Sequence[tf.Tensor | tf.IndexedSlices], control: tf.Tensor, state: Sequence[tf.Tensor]
    ) -> Reduced:
        return self._reduction([tf.convert_to_tensor(gradient) for gradient in gradients], control, state)

    def apply(self, gradients: Sequence[tf.Tensor]) -> None:
        replace_clipping(self.optimizer, self._clip)
        try:
            self.optimizer.apply([gradients[i] for i in self._updated], [self.pieces[i] for i in self._updated])
        finally:
            restore_clipping(self.optimizer)
        values = [tf.convert_to_tensor(piece.value) for piece in self.pieces]  # no constants, even if empty
        whole = self._reduction.all_gather(values, name="weights")
        for index, (weight, value) in enumerate(zip(self._weights, whole, strict=True)):
            weight.assign(value)
            if weight.constraint is not None:
                weight.assign(weight.constraint(tf.convert_to_tensor(weight.value)))
                self.pieces[index].assign(self._cut(index, weight.value))

    def _clip(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Clip as Keras, by limit / max(norm, limit), with norms over all ranks.

        If a norm overflows, the factor is 0 for a gradient's, and NaN for the global one.
        """
        optimizer = self.optimizer
        limit = optimizer.clipnorm or optimizer.global_clipnorm
        if not limit:
            return clip_as_keras(optimizer, gradients)
        # Of all pieces: ranks have different ones.
        dtype = tf.float64 if any(piece.dtype == "float64" for piece in self.pieces) else tf.float32
        mine = tf.stack([2 * tf.nn.l2_loss(tf.cast(gradient, dtype)) for gradient in gradients])
        squares = tf.scatter_nd([[index] for index in self._updated], mine, [len(self.pieces)])
        squares = self._sum(squares, name="clip_norms")
        if not optimizer.clipnorm:
            squares = tf.fill([len(self.pieces)], tf.reduce_sum(squares))
        norms = tf.gather(tf.sqrt(squares), self._updated)
        scales = limit / tf.maximum(norms, limit)
        if not optimizer.clipnorm:
            scales = tf.where(tf.math.is_finite(norms), scales, np.nan)
        return [g * tf.cast(scale, g.dtype) for g, scale in zip(gradients, tf.unstack(scales), strict=True)]

    def _sum(self, vector: tf.Tensor, *, name: str) -> tf.Tensor:
        """Sum over ranks; the vector is hidden because it is constant on ranks without pieces."""
        [total] = self._collective.sum_in_order([prevent_constant_folding(vector)], name=name).tensors
        return total

    def begin_from_weights(self) -> None:
        """Copy the pieces from the weights. Call it before the first update."""
        for index, (piece, weight) in enumerate(zip(self.pieces, self._weights, strict=True)):
            piece.assign(self._cut(index, weight.value))
        for piece, copy in slots_that_begin_as_weights(self.optimizer):
            copy.assign(piece.value)

    def gather(self, slots: Mapping[str, keras.Variable]) -> dict[str, np.ndarray]:
        """Return whole slots, on rank 0 only. Collective."""
        whole = {}
        for name, slot in slots.items():
            value = self._collective.all_gather(tf.convert_to_tensor(slot.value), name=f"slots/{name}")
            if self._collective.world.is_rank0:
                whole[name] = value.numpy().reshape(self.shape_of(slot))
        return whole

    def scatter(self, slots: Mapping[str, keras.Variable], whole: Mapping[str, np.ndarray]) -> None:
        """Set slots from rank 0's whole ones. Collective."""
        for name, slot in slots.items():
            shape = self.shape_of(slot)
            is_rank0 = self._collective.world.is_rank0
            value = tf.constant(whole[name], slot.dtype, shape) if is_rank0 else tf.zeros(shape, slot.dtype)
            [value] = self._collective.broadcast([value], name=f"slots/{name}")
            slot.assign(self._cut(self._weight_of_slot[id(slot)], value))

    def find_changed(self) -> list[str]:
        return [
            weight.path
            for index, (piece, weight) in enumerate(zip(self.pieces, self._weights, strict=True))
            if np.asarray(piece.value).tobytes() != np.asarray(self._cut(index, weight.value)).tobytes()
        ]


def require_elementwise(optimizer: keras.optimizers.Optimizer) -> None:
    """Check that updates are element-wise, by updates of a weight in pieces.

    Raises:
        UsageError: they are not (Adafactor, Muon), or cannot be checked.
    """
    name = type(optimizer).__name__
    remedy = "Leave --shard_optimizer out, or take an optimizer that is, such as adamw, adam or sgd."
    if any(hasattr(optimizer, mark) for mark in MARKS_OF_WRAPPERS):
        raise UsageError(
            f"shard_optimizer is true, but {name} holds other optimizers, whose updates are not known to be "
            f"element-wise. {remedy}"
        )
    random = np.random.default_rng(0)
    first = random.normal(size=PROBE_SHAPE).astype(np.float32)
    gradients = [random.normal(size=PROBE_SHAPE).astype(np.float32) for _ in range(PROBE_UPDATES)]
    try:
        whole = _update(optimizer, first, gradients)
        halves = zip(_halve(first), *map(_halve, gradients), strict=True)
        pieces = [_update(optimizer, piece, of_piece) for piece, *of_piece in halves]
    except Exception as error:
        raise UsageError(
            f"shard_optimizer is true, but whether {name} is element-wise cannot be tried on pieces of a weight: "
            f"{type(error).__name__}: {error}. {remedy}"
        ) from error
    change, changes = (values - first.reshape(-1) for values in (whole.reshape(-1), np.concatenate(pieces)))
    if not np.allclose(changes, change, rtol=0, atol=PROBE_TOLERANCE * np.max(np.abs(change))):
        raise UsageError(
            f"shard_optimizer is true, but an update of {name} is not element-wise: what becomes of a value depends on "
            f"others of its weight, which other ranks have. {remedy}"
        )


def _halve(values: np.ndarray) -> list[np.ndarray]:
    flat = values.reshape(-1)
    return [flat[:PROBE_CUT], flat[PROBE_CUT:]]


def _update(optimizer: keras.optimizers.Optimizer, first: np.ndarray, gradients: Sequence[np.ndarray]) -> np.ndarray:
    """Use a copy of the optimizer, without clipping, at a large rate."""
    config = optimizer.get_config() | {"learning_rate": PROBE_RATE}
    twin = type(optimizer).from_config(config)
    twin.clipnorm = twin.global_clipnorm = twin.gradient_accumulation_steps = None
    weight = keras.Variable(first, dtype="float32")
    for gradient in gradients:
        twin.apply([tf.constant(gradient)], [weight])
    return weight.numpy()
