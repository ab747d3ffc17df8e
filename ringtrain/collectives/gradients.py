"""The reduction of gradients: the one place where the ranks' gradients become the gradient of the global batch.

Each rank brings the gradient of (sum of its samples' losses) / (samples of the global batch), so that the sum over all
ranks is the gradient of the mean over the global batch, and nothing is divided afterwards.

Gradients leave in a few groups, in the order in which the backward pass makes them (the last layer's first), so that
the first groups travel while the rest is still computed. Those of a small model, and all where a rank has one core,
leave at once, with the step's other sums: then the ranks need not agree on an order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import tensorflow as tf

from ringtrain.collectives.base import Collective

Compression = Literal["none", "fp16"]

# Gradients of up to ONE_MESSAGE_BYTES in all leave at once. Otherwise a group is closed once it holds this share of
# all bytes, or this many bytes: small models want few messages, large ones an early start (benchmarks/README.md).
ONE_MESSAGE_BYTES = 1024 * 1024
MAX_GROUPS = 6
MIN_GROUP_BYTES = 256 * 1024


class GradientSpec(NamedTuple):
    """Static properties of a gradient."""

    num_bytes: int
    dtype: str
    is_sparse: bool


class Reduced(NamedTuple):
    """The outcome of a reduction, identical on every rank."""

    gradients: list[tf.Tensor | tf.IndexedSlices]  # in the order given; a sparse one holds each row once
    is_finite: tf.Tensor  # bool []; False if any value on any rank was not finite
    global_norm: tf.Tensor  # float [], the Euclidean norm of all gradients together
    control: tf.Tensor | None = None  # the sum of the control vectors; None if none was given
    state: Sequence[tf.Tensor] = ()  # the sums of what was given as such


@dataclass(frozen=True, kw_only=True)
class GradientReduction:
    """Sums gradients over all ranks."""

    calls: ClassVar[int] = 0  # reductions that this process has set up; 0 says that its ranks train apart

    collective: Collective
    # "fp16" sends float32 and float64 gradients as float16; they come back in their own type. A value beyond 65504
    # becomes infinite, which the finite check sees.
    compression: Compression = "none"
    name: str = "gradients"  # prefix of the collectives' names; unique in a program
    groups: Sequence[Sequence[int]] | None = None  # that travel together, each of one type; None: by ``plan_groups``
    in_groups: bool | None = None  # all in one sum, or in groups; None: by their sizes and the ranks' cores
    read_only: bool = False  # no variable takes over a part of a sum (Collective.all_reduce)

    def __call__(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        control: tf.Tensor | None = None,
        state: Sequence[tf.Tensor] = (),
    ) -> Reduced:
        """Reduce one gradient for each variable, in the order in which the forward pass uses the variables.

        ``control``, a short vector of sums, and ``state`` are summed as well; the finite check is of the gradients
        alone.
        """
        if control is not None and self.leaves_at_once([gradient_spec(each) for each in (*gradients, control)]):
            return self.sum_at_once(gradients, control, state)
        summed_state = self.sum_state(state)
        if control is not None:  # issued once the forward pass has it: it travels while the backward pass computes
            [control] = self.collective.all_reduce([control], name="control").tensors
        sums = self.all_reduce(gradients)
        is_finite, global_norm = check_finite(sums)
        return Reduced(sums, is_finite, global_norm, control, summed_state)

    def all_reduce(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """The sums alone, without the finite check."""
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

    def sum_at_once(self, gradients: Sequence[tf.Tensor], control: tf.Tensor, state: Sequence[tf.Tensor]) -> Reduced:
        """Sum all at once: separately, or, if the backend sums one tensor faster than many, as one vector."""
        GradientReduction.calls += 1
        name, num = f"{self.name}/0", len(gradients)
        if not self.collective.list_types:
            return self._sum_as_vector(gradients, control, name)._replace(state=self.sum_state(state))
        together = [*gradients, control, *state]
        totals = self.collective.all_reduce(together, name=name, ordered=True, read_only=self.read_only)
        sums, (control, *summed_state) = totals.tensors[:num], totals.tensors[num:]
        assert totals.squares is not None
        return Reduced(sums, *check_squares(sums, totals.squares[:num]), control, summed_state)

    def _sum_as_vector(self, gradients: Sequence[tf.Tensor], control: tf.Tensor, name: str) -> Reduced:
        """One vector, which the finite check reads at once, too."""
        vector = tf.concat([*(tf.reshape(gradient, [-1]) for gradient in gradients), control], axis=0)
        [total] = self.collective.all_reduce([vector], name=name).tensors
        lengths = [gradient.shape.num_elements() for gradient in gradients]
        of_gradients, control = tf.split(total, [sum(lengths), control.shape[0]])
        parts = tf.split(of_gradients, lengths) if lengths else []
        reduced = [tf.reshape(part, gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]
        return Reduced(reduced, *check_finite([of_gradients]), control)

    def sum_state(self, state: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums of the other tensors, in addition to the gradients."""

        def sum_group(values: list[tf.Tensor]) -> list[tf.Tensor]:
            return self.collective.all_reduce(values, name=f"state/{values[0].dtype.name}").tensors

        return by_type(state, sum_group)

    def may_sum_alone(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> bool:
        """True if ``sum_alone`` is for these."""
        specs = [gradient_spec(gradient) for gradient in gradients]
        return {spec.dtype for spec in specs} <= set(self.collective.list_types) and self.leaves_at_once(specs)

    def sum_alone(self, gradients: Sequence[tf.Tensor], *, scaled: tuple[int, float]) -> list[tf.Tensor]:
        """One sum of all tensors, without packing them, in the same order on every rank (``Collective.all_reduce``)."""
        GradientReduction.calls += 1
        return self.collective.all_reduce(gradients, name=f"{self.name}/0", ordered=True, scaled=scaled).tensors

    def leaves_at_once(self, specs: Sequence[GradientSpec]) -> bool:
        """True if such gradients are summed together, without packing: none is sparse, and their type is a fast one."""
        if self.groups is not None or self.compression != "none" or any(spec.is_sparse for spec in specs):
            return False
        dtypes = {spec.dtype for spec in specs}
        if len(dtypes) > 1 and not dtypes <= set(self.collective.list_types):
            return False
        if self.in_groups is not None:
            return not self.in_groups
        return not self.collective.overlaps_compute or sum(spec.num_bytes for spec in specs) <= ONE_MESSAGE_BYTES

    def plan_groups(self, specs: Sequence[GradientSpec]) -> list[list[int]]:
        """The groups of ``plan_groups``; several for a small model too, if ``in_groups`` is True."""
        return plan_groups(specs, min_group_bytes=1) if self.in_groups else plan_groups(specs)

    def _sum_dense(self, gradients: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        packed = [self.compress(gradient) for gradient in gradients]
        totals = self.collective.all_reduce(packed, name=name).tensors
        return [_cast(total, gradient.dtype) for total, gradient in zip(totals, gradients, strict=True)]

    def _sum_sparse(self, gradient: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        """Sum a gradient that touches few rows: what travels is each rank's touched rows, each once."""
        rows = merge_rows(gradient)
        values = self.collective.all_gather(self.compress(rows.values), name=f"{name}/values")
        indices = self.collective.all_gather(rows.indices, name=f"{name}/indices")
        # A GPU adds the rows of one index in any order, so that the ranks' sums would differ in their last bits.
        with tf.device("CPU:0"):
            return merge_rows(tf.IndexedSlices(_cast(values, gradient.dtype), indices, gradient.dense_shape))

    def compress(self, tensor: tf.Tensor) -> tf.Tensor:
        """The compressed tensor."""
        return _cast(tensor, "float16") if self.compression == "fp16" and tensor.dtype.is_floating else tensor


def plan_groups(specs: Sequence[GradientSpec], *, min_group_bytes: int = MIN_GROUP_BYTES) -> list[list[int]]:
    """Plan the groups of gradients, as indices into ``specs``, in the order in which the groups become ready.

    A group is of one type. A sparse gradient is a group of its own, and so is a large one: alone, it is reduced without
    being copied into a buffer, unless Horovod fuses it with another that is ready then (``HOROVOD_FUSION_THRESHOLD``).
    """
    total_bytes = sum(spec.num_bytes for spec in specs if not spec.is_sparse)
    is_split = total_bytes > ONE_MESSAGE_BYTES or min_group_bytes < MIN_GROUP_BYTES
    target_bytes = max(min_group_bytes, total_bytes / MAX_GROUPS) if is_split else math.inf
    groups: list[list[int]] = []
    open_groups: dict[str, tuple[list[int], int]] = {}  # type -> (indices, bytes)
    for index in reversed(range(len(specs))):
        spec = specs[index]
        if spec.is_sparse or spec.num_bytes >= target_bytes:
            groups.append([index])
            continue
        indices, num_bytes = open_groups.pop(spec.dtype, ([], 0))
        indices, num_bytes = [*indices, index], num_bytes + spec.num_bytes
        if num_bytes >= target_bytes:
            groups.append(indices)
        else:
            open_groups[spec.dtype] = (indices, num_bytes)
    return groups + [indices for indices, _ in open_groups.values()]


def by_type(tensors: Sequence[tf.Tensor], act: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Apply ``act`` to the tensors of each type together; the results are in the order of the tensors."""
    results = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        for place, result in zip(places, act([tensors[i] for i in places]), strict=True):
            results[place] = result
    return results


def gradient_spec(gradient: tf.Tensor | tf.IndexedSlices) -> GradientSpec:
    """The spec of a gradient of static shape (a sparse one: of its variable's)."""
    if isinstance(gradient, tf.IndexedSlices):
        return GradientSpec(0, gradient.dtype.name, True)
    return GradientSpec((gradient.shape.num_elements() or 0) * gradient.dtype.size, gradient.dtype.name, False)


def merge_rows(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same sparse gradient with each row once: values of rows with the same index added."""
    indices, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def scaled(gradient: tf.Tensor | tf.IndexedSlices, factor: tf.Tensor | float) -> tf.Tensor | tf.IndexedSlices:
    """A gradient times a number."""
    if isinstance(factor, float) and factor == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
    # Not cast if it is a Python number, which would become a float32 before.
    return gradient * (tf.cast if tf.is_tensor(factor) else tf.constant)(factor, gradient.dtype)


def check_finite(
    tensors: Sequence[tf.Tensor | tf.IndexedSlices], squares: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Check if all values are finite (bool []) and compute the norm of all of them together (float []).

    One pass over the data yields both. Only where the sum of squares is not finite, which large finite values can bring
    about as well, is each value looked at. ``squares`` [tensors] are their sums of squares, if they are known.
    """
    values = [t.values if isinstance(t, tf.IndexedSlices) else t for t in tensors]
    norm_dtype = tf.float64 if any(value.dtype == tf.float64 for value in values) else tf.float32
    if squares is None:
        # Squares of half precision would overflow, or round to a thousandth.
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
    """The same by the sums of squares [tensors], which are finite where all values are (``Totals.squares``)."""
    if any(tensor.dtype == tf.float64 for tensor in tensors):
        return check_finite(tensors, squares)
    total = tf.reduce_sum(squares)
    return tf.math.is_finite(total), tf.cast(tf.sqrt(total), tf.float32)


def _cast(tensor: tf.Tensor, dtype: str | tf.DType) -> tf.Tensor:
    return tensor if tensor.dtype == tf.as_dtype(dtype) else tf.cast(tensor, dtype)
