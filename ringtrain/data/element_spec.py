"""Element spec of a stream's batches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.data.pipeline import describe_structure, has_structure_of
from ringtrain.errors import DataError


class Form:
    """Spec of batches (x, y), without the number of samples."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.specs: list[tf.TensorSpec] = tf.nest.flatten(spec)
        self._kinds = [(spec.dtype, tuple(spec.shape[1:])) for spec in self.specs]
        self.nothing = [np.zeros((0, *shape), dtype.as_numpy_dtype) for dtype, shape in self._kinds]

    def look(self, x: Any, y: Any, *, rank: int, step: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Check a batch; return its indices int64 [n] and its flat arrays."""
        leaves = tf.nest.flatten((x, y))
        lengths = {len(leaf) if leaf.ndim else -1 for leaf in leaves}
        kinds = [(tf.as_dtype(leaf.dtype), leaf.shape[1:]) for leaf in leaves]
        is_alike = kinds == self._kinds and has_structure_of(self.spec, (x, y), with_keys=True)
        if not is_alike or len(lengths) != 1 or -1 in lengths:
            raise DataError(
                f"rank {rank} was fed {describe_structure((x, y))} in step {step + 1}; each batch must have the first "
                f"one's structure, types and shapes, {describe_structure(self.spec)}, and one number of samples in "
                "all its arrays. Make all batches equal in shape, such as by resizing or padding."
            )
        # Native byte order, and str as objects: TensorFlow takes an array's bytes unchanged.
        arrays = [np.asarray(leaf, spec.dtype.as_numpy_dtype) for leaf, spec in zip(leaves, self.specs, strict=True)]
        return np.arange(lengths.pop()), arrays


def as_arrays(value: Any, *, with_names: bool = False) -> Any:
    """Convert leaves to arrays; a list is one, tuples and dicts are structures.

    Copies arrays, whose memory may be reused, except TensorFlow's. Namedtuples are kept only ``with_names``.
    """
    if isinstance(value, Mapping):
        return {key: as_arrays(item, with_names=with_names) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [as_arrays(item, with_names=with_names) for item in value]
        return type(value)(*items) if with_names and hasattr(value, "_fields") else tuple(items)
    return np.asarray(value) if tf.is_tensor(value) else np.array(value)


def agree_on_form(collective: Collective, first: tuple[Any, Any] | None) -> Form:
    """Use the first rank's with a batch; raise on every rank if they differ. Collective."""
    mine = None if first is None else tf.nest.map_structure(_kind_of, tuple(first))
    all_ranks = all_gather_object(collective, mine, name="feed_spec")
    fed = [(rank, spec) for rank, spec in enumerate(all_ranks) if spec is not None]
    if not fed:
        raise DataError("no rank was fed a single batch. Look at the generator, or the function.", reach="run")
    _, expected = fed[0]
    for rank, spec in fed:
        if spec != expected:
            raise DataError(
                f"rank {fed[0][0]} is fed {describe_structure(_from_json(expected))}, but rank {rank} "
                f"{describe_structure(_from_json(spec))}; structure, types and shapes must be the same on every rank. "
                "Let all ranks run the same code on data of the same kind.",
                reach="run",
            )
    return Form(_from_json(expected))


def _kind_of(array: Any) -> str:
    """Return for example ``float32 [3]`` for an array [n, 3]."""
    value = np.asarray(array)
    return f"{tf.as_dtype(value.dtype).name} {list(value.shape[1:])}"


def _from_json(value: Any) -> Any:
    """Specs [n, ...] of a structure of kinds."""
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(map(_from_json, value))
    dtype, _, shape = value.partition(" ")
    return tf.TensorSpec([None, *json.loads(shape)], tf.as_dtype(dtype))
