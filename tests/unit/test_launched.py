"""What a run tells whoever launched it."""

from pathlib import Path

import pytest

from ringtrain.runtime.run_record import (
    DIRECTORY_VARIABLE,
    EndRecord,
    StartRecord,
    clear,
    read_end,
    read_run,
    record_end,
    record_start,
)

END = {"event": "end", "status": "data", "exit_code": 3, "message": "rank 1 on n2: no such file"}


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    return tmp_path


def test_a_launcher_hears_of_the_run_and_of_its_end(listener: Path) -> None:
    assert (read_run(listener), read_end(listener)) == (None, None)
    record_start(Path("runs/digits"), step=40, is_complete=False)
    record_end({"event": "end", "status": "preempted", "exit_code": 75, "message": "saved", "stopped_by": "file"})
    assert read_run(listener) == StartRecord(path=Path.cwd() / "runs/digits", step=40, is_complete=False)
    assert read_end(listener) == EndRecord(status="preempted", exit_code=75, message="saved", stopped_by="file")
    assert sorted(path.name for path in listener.iterdir()) == ["end.json", "run.json"]


def test_the_first_recorded_end_is_kept(listener: Path) -> None:
    record_end(END)
    record_end({"event": "end", "status": "failed", "exit_code": 1, "message": "the others are gone"})
    assert read_end(listener) == EndRecord(status="data", exit_code=3, message="rank 1 on n2: no such file")


def test_a_launcher_clears_the_record_of_a_former_start(listener: Path) -> None:
    clear(listener)
    record_start(Path("runs/digits"), step=0, is_complete=True)
    record_end(END)
    clear(listener)
    assert (read_run(listener), read_end(listener)) == (None, None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"path": 1}', '{"status": "x", "exit_code": "y"}'])
def test_invalid_run_records_are_ignored(listener: Path, text: str) -> None:
    (listener / "run.json").write_text(text)
    (listener / "end.json").write_text(text)
    assert (read_run(listener), read_end(listener)) == (None, None)


def test_without_a_launcher_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    record_start(Path("runs/digits"), step=0, is_complete=False)
    record_end(END)
    assert not list(tmp_path.iterdir())


def test_a_launcher_that_is_gone_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "gone"))
    record_start(Path("runs/digits"), step=0, is_complete=False)
    record_end(END)
