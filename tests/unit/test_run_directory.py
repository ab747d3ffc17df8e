"""The run directory: never shared by two runs, and readable line by line."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest

from ringtrain.errors import UsageError
from ringtrain.run_directory import CONFIG_FILE, METRICS_FILE, RunDirectory, create_run_directory


def test_the_default_directory_gets_a_number_where_it_is_taken(tmp_path: Path) -> None:
    made = [create_run_directory(tmp_path / "runs/digits", is_exact=False).name for _ in range(3)]
    assert made == ["digits", "digits-2", "digits-3"]


def test_an_empty_default_directory_is_someone_else_s_that_is_about_to_write(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    assert create_run_directory(tmp_path / "digits", is_exact=False).name == "digits-2"


def test_a_named_directory_may_be_absent_or_empty(tmp_path: Path) -> None:
    assert create_run_directory(tmp_path / "a/b", is_exact=True) == tmp_path / "a/b"
    assert create_run_directory(tmp_path / "a/b", is_exact=True) == tmp_path / "a/b"


def test_a_named_directory_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x").touch()
    with pytest.raises(UsageError, match="not empty"):
        create_run_directory(tmp_path / "a", is_exact=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_place_where_nothing_can_be_made_is_named(tmp_path: Path, is_exact: bool) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/run.*cannot be made: .*--out"):
        create_run_directory(tmp_path / "file/run", is_exact=is_exact)


def test_a_file_in_the_place_of_a_named_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file"):
        create_run_directory(tmp_path / "file", is_exact=True)


def test_runs_that_start_together_never_share_a_directory(tmp_path: Path) -> None:
    start = threading.Barrier(8)
    made: list[Path] = []

    def make() -> None:
        start.wait()
        made.extend(create_run_directory(tmp_path / "run", is_exact=False) for _ in range(4))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == len(made) == 32


def test_each_event_is_a_line_of_valid_json_at_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_event("train", step=1, loss=math.nan, lr=math.inf, gradient_norm=-math.inf, accuracy=0.5)
    run.write_event("end", status="ä\nb")

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is no JSON")

    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert first == {
        "event": "train",
        "step": 1,
        "loss": "nan",
        "lr": "inf",
        "gradient_norm": "-inf",
        "accuracy": 0.5,
    }
    assert second == {"event": "end", "status": "ä\nb"}
    run.close()


def test_the_configuration_is_kept_in_the_order_of_its_fields(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_config({"workload": "digits", "epochs": 3, "a": {"z": 1, "b": None}})
    assert (tmp_path / CONFIG_FILE).read_text() == "workload: digits\nepochs: 3\na:\n  z: 1\n  b: null\n"
    run.close()
