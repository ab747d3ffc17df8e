"""The hash by which replicas are compared, and how a drift is told."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.guard import replicas
from ringtrain.guard.replicas import WORDS_PER_BLOCK, describe_drift, hash_bits

TYPES = ["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "bool"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4), (7, 11, 3)], ids=str)
def test_any_flipped_bit_changes_the_hash(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0, 2, shape).astype(tf.as_dtype(dtype).as_numpy_dtype)
    before, bits = hash_bits(values), values.reshape(-1).view(np.uint8)
    seen = {before}
    for place in range(bits.size):
        for bit in range(8):
            bits[place] ^= 1 << bit
            seen.add(hash_bits(values))
            bits[place] ^= 1 << bit
    assert len(seen) == 1 + 8 * bits.size
    assert hash_bits(values) == before


@pytest.mark.parametrize("place", [0, 1, WORDS_PER_BLOCK - 1, WORDS_PER_BLOCK, 3 * WORDS_PER_BLOCK, -1])
def test_a_flipped_bit_is_seen_in_any_block(place: int) -> None:
    values = np.random.default_rng(0).integers(0, 2**32, 3 * WORDS_PER_BLOCK + 5, dtype=np.uint32)
    before = hash_bits(values)
    for bit in range(32):
        changed = values.copy()
        changed.view(np.uint32)[place] ^= np.uint32(1 << bit)
        assert hash_bits(changed) != before


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_signs_that_flip_together_do_not_cancel(dtype: str) -> None:
    values = np.random.default_rng(0).normal(size=3 * WORDS_PER_BLOCK).astype(dtype)
    before = hash_bits(values)
    for places in ([0, 1], [0, 2], [5, 77], [0, WORDS_PER_BLOCK], range(0, 16), range(values.size)):
        changed = values.copy()
        changed[list(places)] *= -1
        assert hash_bits(changed) != before


def test_the_hash_depends_on_positions() -> None:
    values = np.arange(5 * WORDS_PER_BLOCK, dtype=np.float64)
    blocks = values.reshape(5, -1)
    assert (
        len({hash_bits(v) for v in (values, values[::-1], blocks[[1, 0, 2, 3, 4]].reshape(-1), np.roll(values, 1))})
        == 4
    )


def test_the_hash_is_of_bits_not_of_values() -> None:
    assert hash_bits(np.array([0.0])) != hash_bits(np.array([-0.0]))
    assert hash_bits(np.array([np.nan])) == hash_bits(np.array([np.nan]))


def test_the_hash_is_that_of_the_definition() -> None:
    values = np.random.default_rng(1).integers(0, 2**32, WORDS_PER_BLOCK + 3, dtype=np.uint32)
    factors = [int(factor) for factor in replicas._FACTORS]
    assert all(factor % 2 for factor in factors)
    expected = 0
    for start in (0, WORDS_PER_BLOCK):
        block = values[start : start + WORDS_PER_BLOCK].tolist()
        products = (factor * word for factor, word in zip(factors, block, strict=False))
        expected = (expected * replicas._BLOCK_FACTOR + sum(products)) % 2**64
    assert hash_bits(values) == expected


def test_the_hash_of_a_variable_is_independent_of_its_layout() -> None:
    values = np.arange(12.0).reshape(3, 4)
    variable = keras.Variable(values, dtype="float64")
    assert hash_bits(np.asarray(tf.convert_to_tensor(variable.value))) == hash_bits(values)
    assert hash_bits(np.asfortranarray(values)) == hash_bits(values)


NODES = ["a", "a", "b", "b"]


def test_the_odd_rank_is_named_with_its_variables() -> None:
    hashes = [[1, 2, 3], [1, 2, 3], [9, 2, 9], [1, 2, 3]]
    assert describe_drift(["x", "y", "z"], hashes, NODES) == "rank 2 on b differs from ranks 0, 1, 3 in x, z"


def test_of_two_ranks_none_is_the_odd_one() -> None:
    assert describe_drift(["x"], [[1], [2]], ["a", "b"]) == "rank 0 on a and rank 1 on b differ from each other in x"
    assert "ranks 0, 1 on a and ranks 2, 3 on b" in describe_drift(["x"], [[1], [1], [2], [2]], NODES)


def test_several_odd_ranks_are_named_and_many_variables_counted() -> None:
    names = [f"v{number}" for number in range(10)]
    hashes = [[0] * 10, [1] * 10, [2] * 10, [0] * 10, [0] * 10, [0] * 10]
    drift = describe_drift(names, hashes, [*NODES, "c", "c"])
    assert drift == "rank 1 on a and rank 2 on b differ from ranks 0, 3-5 in v0, v1, v2 and 7 more variables"


def test_drifted_variables_are_listed_for_each_rank() -> None:
    hashes = [[0, 0], [1, 0], [0, 1], [0, 0]]
    assert describe_drift(["x", "y"], hashes, NODES) == (
        "rank 1 on a differs from ranks 0, 2, 3 in x; rank 2 on b differs from ranks 0, 1, 3 in y"
    )
