"""Samples that cannot be read: all are found, and listed for whoever removes them."""

import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import ringtrain.data.unreadable as unreadable
from ringtrain.data.order import SampleOrder
from ringtrain.data.sources import UnreadableSample
from ringtrain.data.unreadable import LIST_FILE, explain_unreadable, search_all, unreadable_error
from ringtrain.errors import DataError
from ringtrain.runtime.world import read_world

ALONE = read_world({})
NUM_SAMPLES = 1000
FAILURE = tf.errors.InvalidArgumentError(None, None, "the failure of the pipeline")


class Files:
    """Samples in files, some of which are damaged."""

    num_samples = NUM_SAMPLES

    def __init__(self, damaged: set[int], directory: Path, seconds: float = 0.0) -> None:
        self._damaged = damaged
        self._directory = directory
        self._seconds = seconds

    def path(self, number: int) -> str:
        return str(self._directory / f"image {number}.png")

    def why_unreadable(self, number: int) -> UnreadableSample | None:
        time.sleep(self._seconds)
        if number not in self._damaged:
            return None
        return UnreadableSample(number, self.path(number), "an empty file", self.path(number))


def explain(source: Any, directory: Path | None) -> Exception:
    """What a failure in the second step becomes, of 10 samples."""
    order = SampleOrder(num_samples=NUM_SAMPLES, global_batch_size=10, shuffle=False)
    return explain_unreadable(source, order, ALONE, directory, FAILURE, 1)


def test_all_samples_are_searched_and_listed(tmp_path: Path) -> None:
    source = Files({12, 3, 400, 998, 500, 501, 502}, tmp_path)
    error = explain(source, tmp_path)
    assert isinstance(error, DataError)
    assert (error.exit_code, error.reach) == (3, "rank")
    message = str(error)
    assert message.startswith(f"7 samples cannot be read: sample 12, {source.path(12)}: an empty file; sample 3, ")
    assert "; and 2 more. Their files are listed in" in message
    listed = (tmp_path / LIST_FILE).read_text().splitlines()
    assert sorted(listed) == sorted(source.path(number) for number in (3, 12, 400, 500, 501, 502, 998))


def test_the_printed_command_removes_them(tmp_path: Path) -> None:
    source = Files({12, 13, 14}, tmp_path)
    for number in (12, 13, 14, 15):
        Path(source.path(number)).write_bytes(b"")
    run = tmp_path / "a run's directory"
    run.mkdir()
    message = str(explain(source, run))
    command = message[message.index("xargs") :]
    subprocess.run(["bash", "-c", command], check=True, timeout=10)
    assert [path.name for path in tmp_path.glob("*.png")] == ["image 15.png"]


def test_a_failure_that_no_sample_explains_stays_as_it_is(tmp_path: Path) -> None:
    assert explain(Files({400}, tmp_path), tmp_path) is FAILURE
    assert not list(tmp_path.iterdir())


def test_a_search_that_takes_long_says_how_far_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreadable, "SEARCH_SECONDS", 0.01)
    monkeypatch.setattr(unreadable, "SAMPLES_PER_SEARCH", 20)
    source = Files({12, 999}, tmp_path, seconds=0.01)
    found, num_searched = search_all(source)
    assert [sample.number for sample in found] == [12]
    assert 20 <= num_searched < NUM_SAMPLES
    message = str(explain(source, tmp_path))
    assert message.startswith("1 sample cannot be read: ")
    assert f" of {NUM_SAMPLES:,} samples were looked at. " in message


@pytest.mark.parametrize("directory", [None, "missing", "a file"])
def test_without_a_directory_of_the_run_a_temporary_file_lists_them(
    directory: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "a file").write_bytes(b"")
    source = Files({12}, tmp_path)
    message = str(explain(source, tmp_path / directory if directory else None))
    [listed] = tmp_path.glob("ringtrain-unreadable-*.txt")
    assert shlex.quote(str(listed)) in message
    assert listed.read_text() == f"{source.path(12)}\n"


def test_samples_of_no_file_are_named_alone(tmp_path: Path) -> None:
    samples = [UnreadableSample(7, "of the Samples", "ValueError: damaged")]
    message = str(unreadable_error(samples, tmp_path, reach="rank"))
    assert message == (
        "1 sample cannot be read: sample 7, of the Samples: ValueError: damaged. Mend or remove what is damaged."
    )
    assert not list(tmp_path.iterdir())
