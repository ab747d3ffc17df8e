"""The ranks of a node fill one cache together: each decodes its share, and all read the whole."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.data.cache import with_cache
from ringtrain.data.formats.image_folder import load_image_folder
from ringtrain.files import cache_directory
from tests.world.group import on_ranks

NUM_IMAGES = 11


def write_images(folder: Path) -> np.ndarray:
    """Two classes of PNG images, which are returned in their order."""
    images = np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, 6, 5, 3), np.uint8)
    for number, image in enumerate(images):
        path = folder / "train" / ("cat" if number < 4 else "dog") / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(image).numpy())
    return images


@pytest.fixture
def folder(tmp_path: Path) -> str:
    write_images(tmp_path)
    return str(tmp_path)


class Counting:
    """A source that notes which samples it is asked to decode."""

    def __init__(self, source: Any, fingerprint: str) -> None:
        self._source, self.num_samples, self.fingerprint = source, source.num_samples, fingerprint
        self.decoded: list[int] = []
        self.gather, self.find_bad = source.gather, source.find_bad

    def gather_good(self, indices: tf.Tensor) -> Any:
        return self._source.gather_good(tf.numpy_function(self._note, [indices], tf.int64))

    def _note(self, indices: np.ndarray) -> np.ndarray:
        self.decoded.extend(indices.tolist())
        return indices


@on_ranks(1, 3)
def test_each_rank_decodes_its_share_and_reads_all(collective: Collective, folder: str) -> None:
    os.environ["XDG_CACHE_HOME"] = folder
    rank, size = collective.world.rank, collective.world.size
    images = np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, 6, 5, 3), np.uint8)
    source = load_image_folder(Path(folder), image_size=None, channels=3)[0]
    for run in range(2):
        counting = Counting(source, source.fingerprint)
        cached = with_cache(counting, "node", collective, name=f"run{run}", num_threads=1)
        share = range(NUM_IMAGES * rank // size, NUM_IMAGES * (rank + 1) // size) if run == 0 else []
        assert counting.decoded == list(share)
        order = np.random.default_rng(rank).permutation(NUM_IMAGES)
        x, y = tf.function(cached.gather)(tf.constant(order))
        np.testing.assert_array_equal(x, images[order])
        np.testing.assert_array_equal(y, order >= 4)
    all_gather_object(collective, None, name="all have read")
    assert [path.suffix for path in cache_directory("decoded", collective.world.node).iterdir()] == [".samples"]
