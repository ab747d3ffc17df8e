"""Checks before a save: equal replicas, by a hash of the bits of weights and slots, and finite values.

An array's hash is the sum over its 32-bit words w_i of m_i * w_i modulo 2^64, with odd m_i that depend on i. Odd
numbers are invertible, so a change in one word always changes the hash. Changes in several cancel with probability
2^-33 for random 64-bit m_i (with 64-bit words, two flipped signs always would). (Multilinear hashing: Carter and Wegman
1979; Lemire and Kaser 2014.)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object, raise_on_all_ranks
from ringtrain.errors import DivergedError, ReplicasDifferError
from ringtrain.messages.ranks import group_ranks, name_ranks
from ringtrain.messages.rules import list_first

WORD_BYTES = 4
WORDS_PER_BLOCK = 1 << 14  # 128 KiB of factors, to fit a core's cache
_MODULUS = 1 << 64
_FACTORS = np.random.default_rng(20).integers(1 << 63, size=WORDS_PER_BLOCK, dtype=np.uint64) << np.uint64(1)
_FACTORS |= np.uint64(1)  # odd
_BLOCK_FACTOR = 0x9E3779B97F4A7C15  # odd: 2^64 over the golden ratio
MAX_NAMED = 3


class ReplicaGuard:
    def __init__(self, variables: Mapping[str, keras.Variable], collective: Collective) -> None:
        """``variables``: without seed generators."""
        self._variables, self._collective = variables, collective
        self._equal_at: int | None = None

    def check(self, step: int, *, again: bool = False) -> None:
        """Compare the values after ``step`` steps; ``again``: also if they were equal at this step. Collective."""
        if self._collective.world.size == 1 or (self._equal_at == step and not again):
            return
        # Flat: TensorFlow makes no array of a bfloat16 scalar.
        hashes = [hash_bits(np.asarray(tf.reshape(v.value, [-1]))) for v in self._variables.values()]
        of_all = hash_bits(np.array(hashes, np.uint64))
        if len(set(all_gather_object(self._collective, of_all, name="replicas"))) == 1:
            self._equal_at = step
            return
        said = all_gather_object(self._collective, [self._collective.world.node, hashes], name="replicas/variables")
        drift = describe_drift(list(self._variables), [of_rank for _, of_rank in said], [node for node, _ in said])
        before = "" if self._equal_at is None else f" (at step {self._equal_at} they were equal)"
        raise ReplicasDifferError(
            f"the ranks hold different values at step {step}{before}: {drift}. Nothing is saved of this step. Either a "
            "device or memory is faulty, or something changes variables on one rank alone. The same command resumes "
            "from the last checkpoint, when all ranks still held the same."
        )


def hash_bits(array: np.ndarray) -> int:
    """Hash below 2^64; differs if arrays of one type and shape differ in one word."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    num_whole = data.size // WORD_BYTES * WORD_BYTES
    words = data[:num_whole].view(np.uint32)
    total = int.from_bytes(data[num_whole:].tobytes(), "little")
    for start in range(0, words.size, WORDS_PER_BLOCK):
        block = words[start : start + WORDS_PER_BLOCK].astype(np.uint64)
        total = (total * _BLOCK_FACTOR + int(np.dot(block, _FACTORS[: block.size]))) % _MODULUS
    return total


def describe_drift(
    names: Sequence[str],
    hashes: Sequence[Sequence[int]],
    nodes: Sequence[str] | Mapping[int, str],
    ranks: Sequence[int] | None = None,
) -> str:
    """``hashes`` [ranks, variables] of ``ranks`` or all."""
    differing = [
        (name, group_ranks(values, ranks)) for name, values in zip(names, zip(*hashes, strict=True), strict=True)
        if len(set(values)) > 1
    ]  # fmt: skip
    parts = []
    for split, group in itertools.groupby(differing, key=lambda item: list(item[1].values())):
        variables = [name for name, _ in group]
        parts.append(f"{_describe_split(split, nodes)} in {list_first(variables, MAX_NAMED, 'variables')}")
    return "; ".join([*parts[:MAX_NAMED], *([f"and {len(parts) - MAX_NAMED} more"] if len(parts) > MAX_NAMED else [])])


def _describe_split(groups: Sequence[Sequence[int]], nodes: Sequence[str] | Mapping[int, str]) -> str:
    most, *few = groups
    if 2 * len(most) > sum(map(len, groups)):
        odd = sorted(itertools.chain.from_iterable(few))
        return f"{name_ranks(odd, nodes)} differ{'s' if len(odd) == 1 else ''} from {name_ranks(most)}"
    return f"{' and '.join(name_ranks(group, nodes) for group in groups)} differ from each other"


def require_finite_values(
    variables: Mapping[str, keras.Variable],
    collective: Collective,
    *,
    step: int,
    though: str = ", though its loss and gradients were",
    remedy: str = "Lower --optimizer.lr, or add --optimizer.clip_global_norm",
) -> None:
    """Raise DivergedError on all ranks. Collective.

    Finite gradients can still make weights non-finite.
    """

    def look() -> None:
        # Eager: tracing a graph would take as long as tens of these checks.
        are_finite = tf.convert_to_tensor([_is_finite(variable.value) for variable in variables.values()]).numpy()
        bad = [name for name, is_finite in zip(variables, are_finite, strict=True) if not is_finite]
        if bad:
            raise DivergedError(
                f"after step {step} not all values of {list_first(bad)} are finite{though}; nothing is saved of it. "
                f"{remedy}; what was saved before is whole."
            )

    raise_on_all_ranks(collective, look, name="finite_values")


def _is_finite(value: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(value)) if tf.as_dtype(value.dtype).is_floating else tf.constant(True)
