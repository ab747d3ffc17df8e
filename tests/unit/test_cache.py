"""Caches of decoded samples: the same samples, decoded once; what is bad stays bad; nothing half-filled is used."""

import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import tensorflow as tf

from ringtrain.collectives.base import Solo
from ringtrain.data import cache
from ringtrain.data.cache import with_cache
from ringtrain.data.cache.node import CacheFile, find_layout, share_of
from ringtrain.data.formats.image_folder import load_image_folder
from ringtrain.data.indexed import from_grain
from ringtrain.data.sources import BadSample, from_arrays
from ringtrain.errors import DataError, UsageError
from ringtrain.files import cache_directory
from ringtrain.runtime.world import World
from tests.unit.images import in_pipeline as run

NUM_SAMPLES = 23
ALL = np.arange(NUM_SAMPLES)
VALUES = np.random.default_rng(0).integers(0, 256, (NUM_SAMPLES, 4, 3), np.uint8)
Mode = Literal["memory", "node"]


class Decoding:
    """A source that notes which samples it decodes; some cannot be."""

    num_samples = NUM_SAMPLES

    def __init__(self, *, bad: Iterable[int] = (), fingerprint: str = "print") -> None:
        self.fingerprint = fingerprint
        self.is_bad = np.isin(ALL, list(bad))
        self.decoded: list[int] = []

    def gather(self, indices: tf.Tensor) -> tuple[Any, tf.Tensor]:
        (values,) = tf.numpy_function(self._decode, [indices], [tf.uint8])
        values.set_shape([None, 4, 3])
        return {"image": values, "double": tf.cast(values, tf.float32) * 2}, tf.gather(ALL, indices)

    def gather_good(self, indices: tf.Tensor) -> tuple[tf.Tensor, Any, tf.Tensor]:
        found = indices[~tf.gather(self.is_bad, indices)]
        return (found, *self.gather(found))

    def find_bad(self, indices: Iterable[int]) -> list[BadSample]:
        return [BadSample(int(index), "here", "damaged") for index in indices if self.is_bad[index]]

    def _decode(self, indices: np.ndarray) -> list[np.ndarray]:
        self.decoded.extend(indices.tolist())
        if self.is_bad[indices].any():
            raise ValueError("a sample is damaged")
        return [VALUES[indices]]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files are cached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_directory("decoded", "node")


def solo() -> Solo:
    return Solo(rank_of_node(0, 1))


def rank_of_node(rank: int, size: int) -> World:
    return World(rank=rank, size=size, local_rank=rank, local_size=size, node="node", launcher="no launcher")


def cached(source: Any, mode: Mode) -> Any:
    return with_cache(source, mode, solo(), name="train", num_threads=2)


def assert_samples(result: Any, indices: Iterable[int]) -> None:
    x, y = result[-2:]
    places = np.array(list(indices), np.int64)
    np.testing.assert_array_equal(x["image"], VALUES[places])
    np.testing.assert_array_equal(x["double"], VALUES[places] * np.float32(2))
    np.testing.assert_array_equal(y, places)


MODES = pytest.mark.parametrize("mode", ["memory", "node"])


@MODES
def test_the_samples_are_the_same_and_each_is_decoded_once(mode: Mode) -> None:
    source = Decoding()
    kept = cached(source, mode)
    assert (kept.num_samples, kept.fingerprint) == (NUM_SAMPLES, "print")
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(NUM_SAMPLES)
        for part in np.split(order, [5, 5, 19]):  # one of them empty
            assert_samples(run(kept.gather, part), part)
    assert sorted(source.decoded) == ALL.tolist()


@MODES
def test_repeated_samples_in_a_batch(mode: Mode) -> None:
    kept = cached(Decoding(), mode)
    assert_samples(run(kept.gather, [3, 3, 7, 3]), [3, 3, 7, 3])


@MODES
def test_the_graph_knows_types_and_shapes_as_without_a_cache(mode: Mode) -> None:
    source = Decoding()
    indices = tf.data.Dataset.range(4).batch(3)
    kept = cached(source, mode)
    for got, given in zip(
        tf.nest.flatten(indices.map(kept.gather).element_spec),
        tf.nest.flatten(indices.map(source.gather).element_spec),
        strict=True,
    ):
        assert got.dtype == given.dtype
        assert got.shape[1:] == given.shape[1:]


@MODES
def test_bad_samples_fail_and_are_found_as_without_a_cache(mode: Mode) -> None:
    source = Decoding(bad=[2, 20])
    kept = cached(source, mode)
    for _ in range(2):
        assert_samples(run(kept.gather, [0, 1, 3]), [0, 1, 3])
        with pytest.raises(tf.errors.OpError, match="a sample is damaged"):
            run(kept.gather, [1, 2, 3])
        found, x, y = run(kept.gather_good, [20, 1, 2, 4])
        assert found.tolist() == [1, 4]
        assert_samples((x, y), [1, 4])
        assert len(run(kept.gather_good, [2, 20])[0]) == 0
        assert kept.find_bad(ALL) == [(2, "here", "damaged"), (20, "here", "damaged")]


@MODES
def test_a_sample_that_could_not_be_read_when_the_cache_was_filled_is_read_again(mode: Mode) -> None:
    source = Decoding(bad=[2])
    kept = cached(source, mode)
    with pytest.raises(tf.errors.OpError, match="a sample is damaged"):
        run(kept.gather, ALL)
    source.is_bad[2] = False
    assert_samples(run(kept.gather, [1, 2, 3]), [1, 2, 3])


@pytest.mark.parametrize("mode", ["none", "memory", "node"])
def test_arrays_need_no_cache(mode: Any, place: Path) -> None:
    source = from_arrays(VALUES, ALL)
    assert with_cache(source, mode, solo(), name="train", num_threads=1) is source
    decoding = Decoding()
    assert (with_cache(decoding, "none", solo(), name="train", num_threads=1)) is decoding
    assert not place.exists()


@MODES
def test_samples_without_one_shape_are_refused(mode: Mode) -> None:
    source = Decoding()
    source.gather = lambda indices: (tf.ragged.range(indices), indices)  # type: ignore[method-assign]
    with pytest.raises(DataError, match="cannot be cached: each sample must have one shape"):
        cached(source, mode)


# --- In memory ---


def test_too_little_memory_is_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:       1 kB\n")
    monkeypatch.setattr(cache, "MEMORY_FILE", tmp_path / "meminfo")
    with pytest.raises(DataError, match=r"23 decoded samples .* need 1,564 bytes.* 1,024 bytes .*--cache node"):
        cached(Decoding(), "memory")


def test_a_limit_of_the_processes_memory_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "read_memory_limits", lambda root: [(1000, root)])
    with pytest.raises(DataError, match=r"need 1,564 bytes.* has 1,000 bytes .*--cache node"):
        cached(Decoding(), "memory")


# --- On the node's disk ---


def test_samples_without_a_fingerprint_are_not_cached_on_a_node() -> None:
    samples = from_grain([(np.zeros(2, np.float32), np.int64(0))] * 3)
    with pytest.raises(UsageError, match="nothing says whether the samples of from_grain are still the same"):
        cached(samples, "node")
    assert cached(samples, "memory").num_samples == 3


def test_a_later_run_finds_the_file(place: Path) -> None:
    cached(Decoding(bad=[5]), "node")
    assert len(list(place.iterdir())) == 1
    source = Decoding(bad=[5])
    kept = cached(source, "node")
    assert_samples(run(kept.gather, [7, 6]), [7, 6])
    assert kept.find_bad(ALL) == [(5, "here", "damaged")]
    assert source.decoded == []


def test_other_samples_get_another_file(place: Path) -> None:
    cached(Decoding(), "node")
    source = Decoding(fingerprint="other")
    cached(source, "node")
    assert sorted(source.decoded) == ALL.tolist()
    assert len(list(place.iterdir())) == 2


def test_a_changed_image_is_decoded_again(tmp_path: Path, place: Path) -> None:
    image = tmp_path / "images/train/cat/1.png"
    image.parent.mkdir(parents=True)
    sizes = set()
    for value in (3, 200):
        image.write_bytes(tf.io.encode_png(np.full((4, 4, 3), value, np.uint8)).numpy())
        sizes.add(image.stat().st_size)
        source, _ = load_image_folder(tmp_path / "images", image_size=None, channels=3)
        x, _ = run(cached(source, "node").gather, [0])
        assert np.unique(x).tolist() == [value]
    assert len(sizes) == 1  # which says nothing, then


def test_files_that_no_run_has_opened_for_long_are_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ages = {"of_today": 0, "of_last_week": 7, "of_last_month": 31}
    place.mkdir(parents=True)
    for name, days in ages.items():
        (place / f"{name}.samples").touch()
        os.utime(place / f"{name}.samples", (time.time() - 86400 * days,) * 2)
    cached(Decoding(), "node")
    cached(Decoding(), "node")
    assert {path.stem for path in place.iterdir()} & set(ages) == {"of_today", "of_last_week"}
    monkeypatch.setattr("ringtrain.data.cache.node.shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(DataError, match="where 100 are free"):
        cached(Decoding(fingerprint="other"), "node")
    assert {path.stem for path in place.iterdir()} & set(ages) == {"of_today"}


@pytest.mark.parametrize(
    "spoil", [lambda path: path.write_bytes(path.read_bytes()[:-9]), lambda path: os.truncate(path, 0)]
)
def test_a_file_that_is_not_whole_is_made_again(place: Path, spoil: Any) -> None:
    cached(Decoding(), "node")
    [path] = place.iterdir()
    spoil(path)
    source = Decoding()
    assert_samples(run(cached(source, "node").gather, [4]), [4])
    assert sorted(source.decoded) == ALL.tolist()


def test_a_failed_fill_leaves_no_file(place: Path) -> None:
    source = Decoding(bad=[20])
    source.gather_good = lambda indices: (indices, *source.gather(indices))  # type: ignore[method-assign]
    with pytest.raises(tf.errors.OpError):
        cached(source, "node")
    assert list(place.iterdir()) == []
    cached(Decoding(), "node")


def test_leftovers_of_a_killed_run_are_removed_but_no_live_file(place: Path) -> None:
    place.mkdir(parents=True)
    left, held = place / ".left.part", place / ".held.part"
    for path in (left, held):
        path.write_bytes(b"half")
    with held.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cached(Decoding(), "node")
    assert sorted(path.suffix for path in place.iterdir()) == [".part", ".samples"]
    assert held.exists()


def test_too_little_space_is_found_before_training(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr("ringtrain.data.cache.node.shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(DataError, match=rf"need [\d,]+ bytes in {place}, where 100 are free.*--cache none") as caught:
        cached(Decoding(), "node")
    assert (caught.value.exit_code, caught.value.reach) == (3, "run")  # all ranks raise it once they have agreed
    assert list(place.iterdir()) == []


def test_an_unwritable_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "ringtrain").touch()
    with pytest.raises(DataError, match=r"ringtrain/decoded/node cannot be used: Not a directory.*XDG_CACHE_HOME"):
        cached(Decoding(), "node")


def test_the_shares_of_a_node_are_all_samples_once() -> None:
    for size in (1, 2, 3, 40):
        shares = [share_of(rank_of_node(rank, size), NUM_SAMPLES) for rank in range(size)]
        assert [sample for share in shares for sample in share] == ALL.tolist()
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_file_has_all_of_its_space_before_it_is_filled(place: Path) -> None:
    source = Decoding()
    file = CacheFile(place, find_layout(source), source.fingerprint)
    filling = file.begin(source)
    assert filling is not None
    assert filling.path.stat().st_blocks * 512 >= file.num_bytes
    assert not file.is_whole()
    filling.close()


def test_a_sample_that_failed_once_is_decoded_in_the_next_run(place: Path) -> None:
    source = Decoding(bad=[7])
    assert [bad.number for bad in cached(source, "node").find_bad(ALL)] == [7]
    mended = Decoding()
    found, _, _ = tf.function(cached(mended, "node").gather_good)(tf.constant(ALL))
    np.testing.assert_array_equal(found, ALL)
    assert len(list(place.rglob("*.samples"))) == 1
