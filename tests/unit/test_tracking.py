"""What a tracker gets: each step once, in order, whatever fails."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ringtrain.cli import main
from ringtrain.config import trackers_of
from ringtrain.errors import UsageError
from ringtrain.tracking.base import Row, TrackedRun, describe_failure
from ringtrain.tracking.feed import Feed
from ringtrain.tracking.follower import SenderBusyError, finish, following, open_sender, start


class Memory:
    """A tracker in memory, which may be down."""

    def __init__(self, address: str = "http://ann:pass@a ringtrain") -> None:
        self.address = address
        self.runs: list[TrackedRun] = []
        self.rows: list[Row] = []
        self.ends: list[tuple[str, Mapping[str, str], list[str]]] = []
        self.is_down = False

    def start(self, run: TrackedRun) -> None:
        self._answer()
        self.runs.append(run)

    def log(self, rows: Sequence[Row]) -> None:
        self._answer()
        self.rows += rows

    def end(self, status: str, tags: Mapping[str, str], files: Sequence[Path]) -> None:
        self._answer()
        self.ends.append((status, tags, [file.name for file in files]))

    def _answer(self) -> None:
        if self.is_down:
            raise ConnectionError("down")

    @property
    def steps(self) -> list[int]:
        return [row.step for row in self.rows]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "digits"
    path.mkdir()
    (path / "config.yaml").write_text("workload: digits\noptimizer: {name: adam, lr: 0.01}\n")
    identity = {"id": "0123456789abcdef", "seed": 0, "started": "2026-11-27T00:00:00Z", "host": "n1"}
    (path / "run.json").write_text(json.dumps(identity))
    write(path, {"event": "start", "size": 2, "versions": {"keras": "3.15"}}, train(10), train(20))
    return path


def write(run: Path, *events: Mapping[str, Any], mode: str = "a") -> None:
    with (run / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps({"time": 5.0, **event}) + "\n" for event in events)


def sent(run: Path, **how: bool) -> Memory:
    """A tracker that has been sent a run."""
    tracker = Memory()
    Feed(run, "memory", tracker=tracker).send(**how)
    return tracker


def train(step: int, **values: float | str) -> dict[str, Any]:
    return {"event": "train", "step": step, "loss": 1.0 / step, **values}


def test_a_run_is_sent_with_its_settings(run: Path) -> None:
    tracker = Memory()
    feed = Feed(run, "memory", tracker=tracker)
    feed.send()
    [there] = tracker.runs
    assert (there.id, there.name) == ("0123456789abcdef", "digits")
    assert there.parameters == {"workload": "digits", "optimizer.name": "adam", "optimizer.lr": 0.01}
    assert there.tags == {"size": "2", "version.keras": "3.15"}
    assert tracker.rows[0] == Row(10, 5.0, {"train/loss": 0.1})
    write(run, train(30, loss="nan"), {"event": "eval", "step": 30, "accuracy": 0.5})
    (run / "report.html").write_text("<html>")
    write(run, {"event": "end", "status": "completed", "exit_code": 0})
    feed.send(ends=False)
    assert tracker.ends == []
    feed.send()
    assert tracker.rows[2:] == [Row(30, 5.0, {}), Row(30, 5.0, {"eval/accuracy": 0.5})]
    assert tracker.ends == [("completed", {"status": "completed", "exit_code": "0"}, ["report.html", "config.yaml"])]


def test_a_tracker_that_was_down_gets_the_rest(run: Path) -> None:
    tracker = Memory()
    feed = Feed(run, "memory", tracker=tracker)
    feed.send()
    tracker.is_down = True
    write(run, train(30))
    with pytest.raises(ConnectionError):
        feed.send()
    tracker.is_down = False
    write(run, train(40))
    feed.send()
    assert tracker.steps == [10, 20, 30, 40]
    assert len(tracker.runs) == 1


def test_the_next_start_sends_only_what_is_new(run: Path) -> None:
    Feed(run, "memory", tracker=Memory()).send()
    # It resumes from step 10, and trains step 20 again.
    start = {"event": "start", "size": 2}
    write(run, start, train(10), {"event": "end", "status": "preempted", "exit_code": 75}, start, train(20), mode="w")
    tracker = Memory()
    feed = Feed(run, "memory", begun=6.0, tracker=tracker)
    feed.send()
    assert tracker.runs == [], "its start is not logged yet"
    write(run, start | {"time": 7.0}, train(30) | {"time": 8.0})
    feed.send()
    assert (len(tracker.runs), tracker.steps, tracker.ends) == (1, [30], [])


def test_each_address_gets_each_step_once(run: Path) -> None:
    first, second = Memory(), Memory("http://b ringtrain")
    for tracker in (first, second, first, second):
        Feed(run, "memory", tracker=tracker).send()
    assert first.steps == second.steps == [10, 20]
    recorded = json.loads((run / "tracker-memory.json").read_text())
    assert list(recorded) == ["http://***@a ringtrain", "http://b ringtrain"]


def test_one_process_sends_at_a_time(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ringtrain.tracking.feed.create_tracker", lambda name: Memory())
    monkeypatch.setattr("ringtrain.commands.track.require_installed", lambda names: None)
    with open_sender(run, "mlflow"):
        assert main(["track", str(run), "--to", "mlflow"]) == 1
        assert f"another process is sending {str(run)!r} to mlflow" in capsys.readouterr().err
        with pytest.raises(SenderBusyError), open_sender(run, "mlflow"):
            pass
    assert main(["track", str(run), "--to", "mlflow"]) == 0


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_killed_run_is_sent_with_an_end(is_dead: bool, run: Path) -> None:
    tracker = sent(run, is_dead=is_dead)
    assert tracker.steps == [10, 20]
    assert tracker.ends == ([("killed", {"status": "killed"}, ["config.yaml"])] if is_dead else [])


def test_the_tags_of_a_run(run: Path) -> None:
    ranks = [{"node": "n1"}, {"node": "n1"}, {"node": "n2"}, "damaged"]
    start = {"event": "start", "size": 3, "ranks": ranks, "launcher": "srun", "git_revision": None}
    write(run, start | {"job": "7"}, start | {"job": "8", "git_revision": "0a1b-dirty"})
    (run / "config.yaml").write_text("optimizer: {}\nbest_metric: accuracy\nbest_direction: max\n")
    for step, accuracy in ((30, 0.5), (40, 0.75), (50, 0.7)):
        write(run, {"event": "eval", "step": step, "accuracy": accuracy})
    write(run, {"event": "end", "status": "completed", "exit_code": 0})
    tracker = sent(run)
    assert tracker.runs[0].tags == {
        "size": "3", "launcher": "srun", "git_revision": "0a1b-dirty", "nodes": "n1, n2", "jobs": "7, 8"
    }  # fmt: skip
    assert tracker.ends[0][1] == {
        "status": "completed", "exit_code": "0", "best.accuracy": "0.75", "best.step": "40"
    }  # fmt: skip


def test_an_incomplete_line_waits_for_its_end(run: Path) -> None:
    tracker = Memory()
    feed = Feed(run, "memory", tracker=tracker)
    line = json.dumps({"time": 5.0, **train(30)}) + "\n"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line[:9])
    feed.send()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line[9:])
    feed.send()
    assert tracker.steps == [10, 20, 30]


def test_trackers_are_checked() -> None:
    assert trackers_of("none") == []
    assert trackers_of("mlflow, wandb") == ["mlflow", "wandb"]
    with pytest.raises(UsageError, match=r"tracker is 'mlfow'; it must be mlflow or .*\. Did you mean 'mlflow'\?"):
        trackers_of("mlfow")


def test_a_missing_package_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["track", str(run), "--to", "mlflow"]) == 2
    assert "tracker is 'mlflow', which is not installed. Install it: pip install 'ringtrain[mlflow]'" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["report.html", "export"])
def test_links_are_not_sent(name: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/model.keras").write_text("secret")
    (run / name).symlink_to(tmp_path / ("elsewhere" if name == "export" else "elsewhere/model.keras"))
    write(run, {"event": "end", "status": "failed", "exit_code": 1})
    tracker = sent(run)
    assert [files for *_, files in tracker.ends] == [["config.yaml"]]


def test_values_that_are_no_numbers_are_left_out(run: Path) -> None:
    write(run, train(30, loss=10**400, lr=0.5) | {"time": "yesterday"}, {"event": "start", "versions": ["keras"]})
    tracker = sent(run)
    assert tracker.rows[-1] == Row(30, 0.0, {"train/lr": 0.5})


def test_failures_are_described_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123abcd")
    error = ConnectionError("https://ann:pass@tracker/api refuses 0123abcd")
    assert describe_failure(error) == "ConnectionError: https://***@tracker/api refuses ***"


@pytest.mark.parametrize("words", [["no-such-run", "--to", "mlflow"], ["RUN", "--to", "none"]])
def test_what_cannot_be_sent_is_refused(
    words: list[str], run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ringtrain.commands.track.require_installed", lambda names: None)
    assert main(["track", *(str(run) if word == "RUN" else word for word in words)]) == 2
    said = capsys.readouterr().err
    assert "is no run directory" in said or "to is 'none'; it must be mlflow, wandb, trackio or an address" in said


def test_a_tracker_that_does_not_work_costs_a_warning(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its package is missing in the process that follows."""
    warnings: list[str] = []
    with following(run, ["mlflow"], warnings.append):
        pass
    assert warnings == [
        f"mlflow did not take all. The next start sends the rest, or: python -m ringtrain track {run} --to mlflow"
    ]
    assert "mlflow takes nothing: ModuleNotFoundError: No module named 'mlflow'" in capfd.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not group sessions")
def test_its_process_takes_no_core_from_the_training(run: Path) -> None:
    """Linux shares cores between sessions: a nice value counts only within one."""
    process = start(run, "mlflow")
    assert process.stdin is not None
    try:
        group, end = Path(f"/proc/{process.pid}/autogroup"), time.monotonic() + 20
        while not group.read_text().endswith(" nice 19\n") and time.monotonic() < end:
            time.sleep(0.02)
        assert group.read_text().endswith(" nice 19\n")
    finally:
        process.stdin.close()
        finish(process, time.monotonic())
