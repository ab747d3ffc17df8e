"""The groups in which gradients are reduced. Without TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Up to ONE_MESSAGE_BYTES are sent at once; else in MAX_GROUPS groups of at least MIN_GROUP_BYTES: few messages for
# small models, an early start for large ones (benchmarks/README.md).
ONE_MESSAGE_BYTES = 1024 * 1024
MAX_GROUPS = 6
MIN_GROUP_BYTES = 256 * 1024


class GradientSpec(NamedTuple):
    num_bytes: int
    dtype: str
    is_sparse: bool


def fits_one_message(specs: Sequence[GradientSpec]) -> bool:
    return sum(spec.num_bytes for spec in specs) <= ONE_MESSAGE_BYTES


def plan_groups(specs: Sequence[GradientSpec], *, min_group_bytes: int = MIN_GROUP_BYTES) -> list[list[int]]:
    """Return groups of indices into ``specs``, in the order in which they become ready.

    A group has one type. Sparse and large gradients are alone: the latter avoid a copy, unless Horovod fuses them
    (``HOROVOD_FUSION_THRESHOLD``).
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
