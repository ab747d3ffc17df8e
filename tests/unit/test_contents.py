"""Digests of what sources hold, and sums that rounding does not change."""

import json
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ringtrain.data import contents
from ringtrain.data.contents import Contents, block_size, digest_blocks, sample_files
from ringtrain.data.sources import from_arrays, from_callable
from ringtrain.guard.contents import digest_contents, find_other_contents

NUM_SAMPLES = 3000
RNG = np.random.default_rng(1)
X = RNG.standard_normal((NUM_SAMPLES, 13)).astype(np.float32)


def with_value(array: np.ndarray, place: Any, value: Any) -> np.ndarray:
    changed = array.copy()
    changed[place] = value
    return changed


def swapped(array: np.ndarray, one: int, other: int) -> np.ndarray:
    order = np.arange(len(array))
    order[[one, other]] = other, one
    return array[order]


OTHERS = {
    "zeros": np.zeros_like(X),
    "NaN": np.full_like(X, np.nan),
    "one NaN": with_value(X, (1234, 5), np.nan),
    "one infinity": with_value(X, (1234, 5), np.inf),
    "one value": with_value(X, (2999, 12), X[2999, 12] + 0.1),
    "another sample": with_value(X, 7, X[8]),
    "reordered": X[RNG.permutation(NUM_SAMPLES)],
    "two neighbours": swapped(X, 1, 0),
    "scaled": X * np.float32(1.01),
    "another set": RNG.standard_normal(X.shape).astype(np.float32),
}


def digests(array: Any) -> list[str]:
    return digest_blocks(tf.constant(array), block_size(len(array)))


def other_sums(one: Any, other: Any) -> list[int]:
    size = block_size(len(one))
    one, other = tf.constant(one), tf.constant(other)
    return contents.find_other_sums(contents.sum_blocks(one, size), contents.sum_blocks(other, size), one.dtype.name)


@pytest.mark.parametrize("case", OTHERS)
def test_other_values_have_other_digests_and_other_sums(case: str) -> None:
    assert digests(X) != digests(OTHERS[case])
    assert other_sums(X, OTHERS[case])
    assert other_sums(OTHERS[case], X)


def test_a_digest_sees_every_byte() -> None:
    values = np.arange(1030 * 5, dtype=np.uint8).reshape(1030, 5)
    first = digests(values)
    assert len(first) == 515
    for sample in (0, 1, 511, 1028, 1029):
        for column in (0, 4):
            changed = digests(with_value(values, (sample, column), 255 - values[sample, column]))
            assert [place for place in range(515) if changed[place] != first[place]] == [sample // 2]


@pytest.mark.parametrize(
    "array", [np.array([True, False]), np.array([b"a", b""]), np.array([["a"], ["b"]]), np.array([1 + 2j, 3])]
)
def test_arrays_of_every_type_have_digests(array: Any) -> None:
    assert digests(array) == digests(array) != digests(array[::-1])


def test_a_digest_does_not_depend_on_how_the_block_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = digest_blocks(tf.constant(X), 7)
    monkeypatch.setattr(contents, "COPIED_BYTES", 1)
    assert digest_blocks(tf.constant(X), 7) == whole


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64"])
def test_rounding_does_not_change_sums(dtype: str) -> None:
    exact = tf.cast(tf.constant(RNG.standard_normal((NUM_SAMPLES, 300))), dtype)
    step = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(dtype, 2.0**-23)
    up = tf.cast(tf.cast(exact, "complex128") * (1 + step), dtype) if exact.dtype.is_complex else None
    rounded = up if up is not None else tf.cast(tf.cast(exact, "float64") * (1 + step), dtype)
    assert digests(exact) != digests(rounded)
    assert other_sums(exact, rounded) == []
    assert other_sums(exact, tf.reverse(exact, [0])) != []


def test_changes_in_small_columns_next_to_large_ones_are_seen() -> None:
    table = X * np.logspace(0, 4, 13, dtype=np.float32)
    assert other_sums(table, np.nextafter(table, np.float32(np.inf))) == []
    assert len(other_sums(table, with_value(table, (slice(None), 0), 0.0))) == len(digests(table))


def test_residues_of_a_subtraction_count_as_rounding() -> None:
    one, other = X.copy(), X.copy()
    one[:, 3], other[:, 3] = 0.0, 1e-8  # a constant column less its mean
    assert other_sums(one, other) == []


def test_huge_values_hide_no_difference_in_other_blocks() -> None:
    one = with_value(X.astype(np.float64), (0, 0), 1e300)
    other = with_value(one, (slice(1500, 1600), slice(None)), 0.0)
    assert other_sums(one, one * (1 + 1e-15)) == []
    assert set(other_sums(one, other)) == set(range(1500 // 3, 1600 // 3 + 1))


def test_values_nonfinite_on_both_sides_are_no_difference() -> None:
    one = with_value(X, (slice(0, 3000, 3), 2), np.nan)
    assert other_sums(one, np.nextafter(one, np.float32(np.inf))) == []
    assert other_sums(one, with_value(one, (0, 2), -np.inf)) == [0]


def write_files(folder: Path, sizes: list[int]) -> tf.Tensor:
    paths = [folder / f"class/{number}.bin" for number in range(len(sizes))]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(np.random.default_rng(size).bytes(size))
    return tf.constant([str(path) for path in paths])


def test_files_are_identified_by_name_size_and_content_not_path(tmp_path: Path) -> None:
    first = sample_files(write_files(tmp_path / "a", [5, 5000, 0]))
    assert sample_files(write_files(tmp_path / "b", [5, 5000, 0])) == first
    assert [entry.split(",")[0] for entry in first] == [
        "class/0.bin of 5 bytes",
        "class/1.bin of 5",
        "class/2.bin of 0 bytes",
    ]
    path = tmp_path / "b/class/1.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    changed = sample_files(tf.constant([str(tmp_path / f"b/class/{number}.bin") for number in range(3)]))
    assert [place for place in range(3) if changed[place] != first[place]] == [1]


def test_of_many_large_files_pieces_all_over_them_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "SAMPLED_PIECES", 8)
    paths = write_files(tmp_path, [100 * contents.PIECE_BYTES] * 4)
    first = sample_files(paths)
    for path in paths.numpy():
        Path(path.decode()).write_bytes(bytes(100 * contents.PIECE_BYTES))
    assert all(now != before for now, before in zip(sample_files(paths), first, strict=True))
    monkeypatch.setattr(contents, "SAMPLED_PIECES", 2)
    assert len(sample_files(paths)) == 2


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    [entry] = sample_files(tf.constant([str(tmp_path / "a/b.jpg")]))
    assert entry == "a/b.jpg that cannot be read: No such file or directory"


def test_streams_and_user_defined_sources_are_not_digested() -> None:
    source = from_arrays({"image": X, "vector": X}, X[:, 0])
    facts = Contents({"train": source, "evaluation": from_callable(lambda rank, step: None)}).facts()
    assert list(facts) == ["train x/image", "train x/vector", "train y"]
    assert Contents({"train": object(), "evaluation": None}).facts() == {}


def test_a_cancelled_digest_stops_reading() -> None:
    is_unwanted = Event()
    is_unwanted.set()
    assert digest_blocks(tf.constant(X), 3, is_unwanted) == []


def test_data_are_recognised_by_their_recorded_digests() -> None:
    noted = json.loads(json.dumps(digest_contents(Contents({"train": from_arrays(X, X[:, 0]), "evaluation": None}))))
    assert noted.keys() == {"train x", "train y"}
    other = digest_contents(Contents({"train": from_arrays(with_value(X, (7, 1), 0.5), X[:, 0])}))
    assert find_other_contents(noted, other) == ["train x"]
    assert find_other_contents(noted, noted) == []


@pytest.mark.parametrize("former", [None, [], "x", {}, {"train x": None}])
def test_data_without_recorded_digests_are_not_reported(former: Any) -> None:
    assert find_other_contents(former, {"train y": "1"}) == []
