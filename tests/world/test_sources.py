"""All ranks must have the same data: what shows at once, and then what the samples are."""

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.config import Config
from ringtrain.data import contents
from ringtrain.data.contents import Contents
from ringtrain.data.formats.image_folder import load_image_folder
from ringtrain.data.sources import ArraySource, from_arrays, from_callable
from ringtrain.errors import DataError, RingtrainError
from ringtrain.guard.contents import require_same_contents
from ringtrain.guard.preflight import require_same_sources
from ringtrain.messages.log import show_log
from ringtrain.training.job import create_job
from ringtrain.workloads.base import Sources
from tests.unit.test_contents import with_value
from tests.world.group import on_ranks
from tests.world.workloads.small import Small


class Printed:
    """Five samples with a fingerprint."""

    num_samples = 5

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint


def arrays(count: int) -> Any:
    return from_arrays(np.zeros(count), np.zeros(count))


def feed(steps_per_epoch: int) -> Any:
    return from_callable(lambda rank, step: None, steps_per_epoch=steps_per_epoch)


# For each case: what rank 0 has, what the last rank has, and what is said of them.
CASES: dict[str, tuple[Any, Any, list[str]]] = {
    "counts": (arrays(5), arrays(6), [" 5 samples", " 6 samples"]),
    "files": (Printed("a" * 64), Printed("b" * 64), ["fingerprint aaaaaaaaaaaa", "fingerprint bbbbbbbbbbbb"]),
    "nothing": (None, arrays(6), [" nothing", " 6 samples"]),
    "something": (arrays(6), None, [" 6 samples", " nothing"]),
    "feeds": (feed(3), feed(4), ["of each rank, of 3 steps", "of each rank, of 4 steps"]),
    "kinds of feeds": (feed(3), feed(3)._replace(is_shared=True), ["a feed of each rank", "a dataset for all ranks"]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("part", ["train", "evaluation"])
@on_ranks(2, slow=[3])
def test_other_data_on_another_rank_are_an_error_on_every_rank(collective: Collective, case: str, part: str) -> None:
    first, last, words = CASES[case]
    is_last = collective.world.rank == collective.world.size - 1
    values = {"train": arrays(7), "evaluation": arrays(7), part: last if is_last else first}
    with pytest.raises(DataError) as error:
        require_same_sources(collective, Sources(**values))
    assert all(word in str(error.value) for word in [part, f"rank {collective.world.size - 1} on", *words])
    assert len(set(all_gather_object(collective, str(error.value), name="message"))) == 1


@on_ranks(2)
def test_the_same_data_are_no_error(collective: Collective) -> None:
    parts: list[tuple[Any, Any]] = [(arrays(3), None), (Printed("a"), arrays(2)), (feed(3), None)]
    for train, evaluation in parts:
        require_same_sources(collective, Sources(train, evaluation))


NUM_SAMPLES = 3000
X = np.random.default_rng(0).standard_normal((NUM_SAMPLES, 2, 3)).astype(np.float32)
Y = np.arange(NUM_SAMPLES) % 7


# For each case: what the last rank has, and what is said of it and of the first.
CONTENTS: dict[str, tuple[Any, Any, str, str, str]] = {
    "zeros": (np.zeros_like(X), Y, "train x, sample 0 at [0, 0] (from 0)", "0.0", str(X[0, 0, 0])),
    "NaN": (with_value(X, (1234, 1, 2), np.nan), Y,
            "train x, sample 1234 at [1, 2] (from 0)", "nan", str(X[1234, 1, 2])),
    "reordered": (X[::-1], Y, "train x, sample 0 at [0, 0] (from 0)", str(X[-1, 0, 0]), str(X[0, 0, 0])),
    "swapped": (X[[*range(2997), 2998, 2997, 2999]], Y, "train x, sample 2997 at [0, 0] (from 0)",
                str(X[2998, 0, 0]), str(X[2997, 0, 0])),
    "rounded, and one other": (np.nextafter(with_value(X, (2999, 0, 1), 5.0), np.float32(9)), Y,
                "train x, sample 2999 at [0, 1] (from 0)", "5.0000005", str(X[2999, 0, 1])),
    "labels": (X, with_value(Y, 2047, 9), "train y, sample 2047 (from 0)", "9", str(Y[2047])),
}  # fmt: skip


def refusal(collective: Collective, read: Contents) -> str:
    with pytest.raises(DataError) as error:
        require_same_contents(collective, read)
    assert error.value.reach == "run"
    assert len(set(all_gather_object(collective, str(error.value), name="message"))) == 1
    return str(error.value)


@pytest.mark.parametrize("case", CONTENTS)
@on_ranks(2, slow=[3])
def test_the_first_sample_that_differs_is_named(collective: Collective, case: str) -> None:
    x, y, where, odd_value, value = CONTENTS[case]
    rank, last = collective.world.rank, collective.world.size - 1
    source = from_arrays(x, y) if rank == last else from_arrays(X, Y)
    lines = refusal(collective, Contents({"train": source, "evaluation": from_arrays(X, Y)})).splitlines()
    assert lines[0].startswith("the ranks have different data; nothing was trained.")
    assert len(lines) == 2
    assert lines[1].startswith(f"  {where}: rank {last} on {collective.world.node} has {odd_value}, ")
    assert lines[1].endswith(f"{value}")


@on_ranks(3)
def test_rounding_is_a_warning(collective: Collective) -> None:
    rank = collective.world.rank
    x = X if rank == 0 else np.nextafter(X, np.float32(10 * rank - 15))
    said: list[str] = []
    with show_log(said.append):
        require_same_contents(collective, Contents({"train": from_arrays({"a": x, "b": X}, Y), "evaluation": None}))
    [line] = said
    node = collective.world.node
    assert line.startswith(
        f"warning: the ranks' data are the same except for rounding (train x/a of ranks 1, 2 on {node})"
    )


@on_ranks(1, 2)
def test_the_same_samples_are_no_error(collective: Collective) -> None:
    for source in (from_arrays(X, np.array(["a", "b"] * 1500)), feed(3), from_arrays(with_value(X, 0, np.nan), Y)):
        with show_log(pytest.fail):
            require_same_contents(collective, Contents({"train": source, "evaluation": None}))


@on_ranks(2)
def test_images_of_equal_name_and_size_are_compared_by_content(collective: Collective) -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / str(collective.world.rank)
        for name in ("cat", "dog"):
            path = folder / "train" / name / "1.png"
            path.parent.mkdir(parents=True)
            path.write_bytes(tf.io.encode_png(tf.cast(X[:9] * 50 + 100, tf.uint8)).numpy())
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= collective.world.rank
        path.write_bytes(content)
        train, _ = load_image_folder(folder, image_size=8, channels=3)
        require_same_sources(collective, Sources(train, None))
        message = refusal(collective, Contents({"train": train, "evaluation": None}))
    name = f"{path.parent.name}/{path.name}"
    assert f"  train file {train.num_samples}: rank 1 on {collective.world.node} has {name} of " in message


@on_ranks(2)
def test_a_failure_of_the_reader_thread_is_raised_on_all_ranks(collective: Collective) -> None:
    broken = MemoryError("no memory for a copy") if collective.world.rank == 1 else None
    digest = contents.digest_blocks
    with patch.object(contents, "digest_blocks", side_effect=broken or digest):
        read = Contents({"train": from_arrays(X, Y), "evaluation": None})
        with pytest.raises(
            RingtrainError, match=r"the data cannot be read to be compared .*: MemoryError: no memory for a copy"
        ):
            require_same_contents(collective, read)


class OtherFloats(Small):
    """Samples that are zeros on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        train = super().create_sources(data_dir, synthetic=synthetic).train
        assert isinstance(train, ArraySource)
        x, y = train.x, train.y
        return Sources(from_arrays(tf.zeros_like(x) if self.rank == 1 else x, y), None)


@on_ranks(2)
def test_a_job_of_ranks_with_other_floats_is_refused(collective: Collective) -> None:
    with pytest.raises(DataError, match=r"train x, sample 0 at \[0\] \(from 0\): rank 1 on \S+ has 0.0, rank 0 on"):
        create_job(OtherFloats(collective.world.rank), Config(workload="small", epochs=1), collective, num_threads=1)
