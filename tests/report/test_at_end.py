"""Each run leaves its report, however it ends; a report that fails harms no run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ringtrain.errors import DivergedError, PreemptedError
from ringtrain.run.directory import RunDirectory
from ringtrain.run.lease import LeaseLostError
from ringtrain.runtime.stopping import StopRequests
from ringtrain.runtime.world import read_world
from ringtrain.terminal.console import Console
from ringtrain.training.ending import recording_end
from tests.report.made_run import START, make_run, timed, train_event

LOG = "console.log"


def end_run(path: Path, error: BaseException | None, may_write: Callable[[], None] = lambda: None) -> str:
    """End a run as ``train`` does, with an error or without, and give what its console showed."""
    make_run(path, timed([START, train_event(1)]))
    run = RunDirectory(path, may_write=may_write)
    with (path.parent / LOG).open("w+") as stream:
        console, requests = Console(stream, is_terminal=False), StopRequests()
        with recording_end(run, False, requests, read_world({}), console):
            if error is not None:
                raise error
        stream.seek(0)
        return stream.read()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "completed"),
        (DivergedError("step 2: nan"), "diverged, exit code 4: step 2: nan"),
        (PreemptedError("stopped by SIGTERM"), "preempted, exit code 75: stopped by SIGTERM"),
        (ValueError("a defect"), "failed, exit code 1: ValueError: a defect"),
        (KeyboardInterrupt(), "failed, exit code 1: KeyboardInterrupt"),
    ],
)
def test_a_run_writes_its_report_at_the_end(error: BaseException | None, status: str, tmp_path: Path) -> None:
    if error is None:
        assert end_run(tmp_path / "run", None) == ""
    else:
        with pytest.raises(type(error)):
            end_run(tmp_path / "run", error)
        assert (tmp_path / LOG).read_text() == ""
    assert status in (tmp_path / "run/report.html").read_text()


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run/report.html/occupied").mkdir(parents=True)
    (tmp_path / "run").rename(tmp_path / "former")

    def occupy() -> None:
        if not (tmp_path / "run/report.html").exists():
            (tmp_path / "former/report.html").rename(tmp_path / "run/report.html")

    shown = end_run(tmp_path / "run", None, may_write=occupy)
    assert shown.startswith("warning: report.html was not written: ")
    assert len(shown.splitlines()) == 1
    end = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert (end["event"], end["status"]) == ("end", "completed")


@pytest.mark.parametrize("calls_allowed", [0, 1], ids=["before the end", "while the report is made"])
def test_who_has_been_taken_over_writes_no_report(tmp_path: Path, calls_allowed: int) -> None:
    calls = 0

    def may_write() -> None:
        nonlocal calls
        calls += 1
        if calls > calls_allowed:
            raise LeaseLostError("taken over")

    assert end_run(tmp_path / "run", None, may_write=may_write) == ""
    assert calls == calls_allowed + 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.yaml", "metrics.jsonl"]
