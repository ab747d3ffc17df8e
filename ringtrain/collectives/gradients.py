"""Reduction of gradients to the gradient of the global batch.

Each rank brings the gradient of (sum of its losses) / (samples of the global batch): no division afterwards. Groups are
reduced in the order of the backward pass (last layer first), overlapping compute. Small models, and ranks with one
core, reduce all at once with the step's other sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import tensorflow as tf

from ringtrain.collectives.base import Collective
from ringtrain.collectives.groups import GradientSpec, fits_one_message, plan_groups
from ringtrain.errors import UsageError

Compression = Literal["none", "fp16", "bf16"]
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


class Reduced(NamedTuple):
    """Sums, identical on every rank."""

    gradients: list[tf.Tensor | tf.IndexedSlices]  # sparse ones have unique rows
    is_finite: tf.Tensor  # bool [], for all ranks
    global_norm: tf.Tensor  # float [], Euclidean
    control: tf.Tensor | None = None
    state: Sequence[tf.Tensor] = ()


@dataclass(frozen=True, kw_only=True)
class GradientReduction:
    calls: ClassVar[int] = 0  # set up in this process; 0: its ranks train separately

    collective: Collective
    # float16 values beyond 65504 become infinite, which the finite check detects.
    compression: Compression = "none"
    name: str = "gradients"  # unique
    groups: Sequence[Sequence[int]] | None = None  # fused, of one type each; None: by ``plan_groups``
    in_groups: bool | None = None  # False: one sum; None: by size and cores
    read_only: bool = False  # see Collective.sum_in_order

    def __post_init__(self) -> None:
        if self.compression == "bf16" and not self.collective.sums_bfloat16:
            raise UsageError(
                f"compression is 'bf16', but {self.collective.description} sums the gradients, and Horovod has no "
                "bfloat16. Use --compression fp16; on CPUs, --backend native also sums bfloat16."
            )

    def __call__(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        control: tf.Tensor | None = None,
        state: Sequence[tf.Tensor] = (),
    ) -> Reduced:
        """Reduce one gradient per variable, in the order of the forward pass.

        ``control`` (a vector) and ``state`` are summed without a finite check.
        """
        if control is not None and self.is_single_message([gradient_spec(each) for each in (*gradients, control)]):
            return self.all_reduce_fused(gradients, control, state)
        summed_state = self.sum_state(state)
        if control is not None:  # overlaps the backward pass
            [control] = self.collective.all_reduce([control], name="control")
        sums = self.all_reduce(gradients)
        is_finite, global_norm = check_finite(sums)
        return Reduced(sums, is_finite, global_norm, control, summed_state)

    def all_reduce(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sum without the finite check."""
        GradientReduction.calls += 1
        groups = self.groups or self.plan_groups([gradient_spec(gradient) for gradient in gradients])
        sums: list[tf.Tensor | tf.IndexedSlices] = list(gradients)
        for number, group in enumerate(groups):
            name = f"{self.name}/{number}"
            if gradient_spec(gradients[group[0]]).is_sparse:
                sums[group[0]] = self._sum_sparse(gradients[group[0]], name)
            else:
                for index, total in zip(group, self._sum_dense([gradients[i] for i in group], name), strict=True):
                    sums[index] = total
        return sums

    def all_reduce_fused(
        self, gradients: Sequence[tf.Tensor], control: tf.Tensor, state: Sequence[tf.Tensor]
    ) -> Reduced:
        """Sum a list, or one vector if the backend is faster with it."""
        GradientReduction.calls += 1
        name, num = f"{self.name}/0", len(gradients)
        if not self.collective.list_types:
            return self._sum_as_vector(gradients, control, name)._replace(state=self.sum_state(state))
        together = [*map(self.compress, gradients), control, *state]
        totals = self.collective.sum_in_order(together, name=name, read_only=self.read_only)
        sums = [_cast(total, gradient.dtype) for total, gradient in zip(totals.tensors[:num], gradients, strict=True)]
        control, *summed_state = totals.tensors[num:]
        assert totals.squares is not None
        return Reduced(sums, *check_squares(sums, totals.squares[:num]), control, summed_state)

    def _sum_as_vector(self, gradients: Sequence[tf.Tensor], control: tf.Tensor, name: str) -> Reduced:
        vector = tf.concat([*(tf.reshape(gradient, [-1]) for gradient in gradients), control], axis=0)
        [total] = self.collective.all_reduce([vector], name=name)
        lengths = [gradient.shape.num_elements() for gradient in gradients]
        of_gradients, control = tf.split(total, [sum(lengths), control.shape[0]])
        parts = tf.split(of_gradients, lengths) if lengths else []
        reduced = [tf.reshape(part, gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]
        return Reduced(reduced, *check_finite([of_gradients]), control)

    def sum_state(self, state: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        def sum_group(values: list[tf.Tensor]) -> list[tf.Tensor]:
            return self.collective.all_reduce(values, name=f"state/{values[0].dtype.name}")

        return by_type(state, sum_group)

    def can_use_single_all_reduce(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> bool:
        specs = [gradient_spec(gradient) for gradient in gradients]
        return {spec.dtype for spec in specs} <= set(self.collective.list_types) and self.is_single_message(specs)

    def single_all_reduce(self, gradients: Sequence[tf.Tensor], *, scaled: tuple[int, float]) -> list[tf.Tensor]:
        GradientReduction.calls += 1
        return self.collective.sum_in_order(gradients, name=f"{self.name}/0", scaled=scaled).tensors

    def is_single_message(self, specs: Sequence[GradientSpec]) -> bool:
        """True if all are summed together, unpacked."""
        if self.groups is not None or any(spec.is_sparse for spec in specs):
            return False
        if self.compression != "none" and not self.collective.list_types:
            return False
        dtypes = {spec.dtype for spec in specs}
        if len(dtypes) > 1 and not dtypes <= set(self.collective.list_types):
            return False
        if self.in_groups is not None:
            return not self.in_groups
        return not self.collective.overlaps_compute or fits_one_message(specs)

    def plan_groups(self, specs: Sequence[GradientSpec]) -> list[list[int]]:
        return plan_groups(specs, min_group_bytes=1) if self.in_groups else plan_groups(specs)

    def _sum_dense(self, gradients: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        packed = [self.compress(gradient) for gradient in gradients]
        totals = self.collective.all_reduce(packed, name=name)
        return [_cast(total, gradient.dtype) for total, gradient in zip(totals, gradients, strict=True)]

    def _sum_sparse(self, gradient: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        rows = merge_rows(gradient)
        values = self.collective.all_gather(self.compress(rows.values), name=f"{name}/values")
        indices = self.collective.all_gather(rows.indices, name=f"{name}/indices")
        # GPUs add rows in any order: ranks would differ in the last bits.
        with tf.device("CPU:0"):
            return merge_rows(tf.IndexedSlices(_cast(values, gradient.dtype), indices, gradient.dense_shape))

    def compress(self, tensor: tf.Tensor) -> tf.Tensor:
        return _cast(tensor, DTYPES.get(self.compression, tensor.dtype)) if tensor.dtype.is_floating else tensor


def by_type(tensors: Sequence[tf.Tensor], act: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    results = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        for place, result in zip(places, act([tensors[i] for i in places]), strict=True):
            results[place] = result
    return results


def gradient_spec(gradient: tf.Tensor | tf.IndexedSlices) -> GradientSpec:
    """Needs a static shape."""
    if isinstance(gradient, tf.IndexedSlices):
        return GradientSpec(0, gradient.dtype.name, True)
    return GradientSpec((gradient.shape.num_elements() or 0) * gradient.dtype.size, gradient.dtype.name, False)


def merge_repeated_rows(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """Add the rows of a sparse gradient that have the same index; a dense gradient is unchanged."""
    if isinstance(gradient, tf.IndexedSlices):
        return merge_rows(gradient)
    return gradient


def merge_rows(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    indices, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def scaled(gradient: tf.Tensor | tf.IndexedSlices, factor: tf.Tensor | float) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(factor, float) and factor == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
    # A Python number would first become a float32 in tf.cast.
    return gradient * (tf.cast if tf.is_tensor(factor) else tf.constant)(factor, gradient.dtype)


def check_finite(
    tensors: Sequence[tf.Tensor | tf.IndexedSlices], squares: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return if all values are finite (bool []), and their norm (float []), in one pass unless the squares overflow.

    ``squares``: [tensors], if known.
    """
    values = [t.values if isinstance(t, tf.IndexedSlices) else t for t in tensors]
    norm_dtype = tf.float64 if any(value.dtype == tf.float64 for value in values) else tf.float32
    if squares is None:
        # They would overflow or lose digits.
        wide = [tf.cast(value, norm_dtype) if value.dtype.size < 4 else value for value in values]
        half_squares = tf.add_n([tf.cast(tf.nn.l2_loss(value), norm_dtype) for value in wide])
    else:
        half_squares = tf.cast(tf.reduce_sum(squares) / 2, norm_dtype)
    is_finite = tf.cond(
        tf.math.is_finite(half_squares),
        lambda: tf.constant(True),
        lambda: tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values]),
    )
    return is_finite, tf.sqrt(2 * half_squares)


def check_squares(tensors: Sequence[tf.Tensor], squares: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    if any(tensor.dtype == tf.float64 for tensor in tensors):
        return check_finite(tensors, squares)
    total = tf.reduce_sum(squares)
    return tf.math.is_finite(total), tf.cast(tf.sqrt(total), tf.float32)


def _cast(tensor: tf.Tensor, dtype: str | tf.DType) -> tf.Tensor:
    return tensor if tensor.dtype == tf.as_dtype(dtype) else tf.cast(tensor, dtype)
