"""Each wrong value in each field of a run directory: all who read it answer, without a traceback."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.slurm import status
from ringtrain.commands.preparing import RunOptions, read_settings
from ringtrain.errors import RingtrainError
from ringtrain.report import write_report
from ringtrain.run import lease
from ringtrain.run.directory import CONFIG_FILE, IDENTITY_FILE, METRICS_FILE, read_config
from ringtrain.run.resume import open_run
from ringtrain.runtime.world import read_world
from ringtrain.tracking.base import Row, TrackedRun
from ringtrain.tracking.feed import Feed
from tests.faults.test_fuzz import make_run

WRONG_VALUES = {
    "text": "text",
    "nothing": None,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "zero": 0,
    "minus one": -1,
    "a fraction": -5.5,
    "true": True,
    "a list": [],
    "a list of numbers": [1],
    "a mapping": {"a": 1},
    "400 digits": 10**400,
    "beyond 64 bits": 2**63,
    "almost infinity": 1e308,
    "half a character": "\ud800",
    "a long text": "x" * 5000,
    "many lists": [[1]] * 1000,
    "control characters": "\x1b[31m\n",
}
START = {
    "event": "start", "workload": "digits", "size": 2, "launcher": "mpirun", "communication": "native",
    "ranks": [{"rank": rank, "node": "n1", "pid": 7, "device": "CPU", "threads": 1} for rank in range(2)],
    "versions": {"ringtrain": "0.2.0", "tensorflow": "2.21.0"}, "git_revision": None, "samples": 640,
    "global_batch_size": 64, "steps_per_epoch": 10, "first_step": 0, "total_steps": 40, "parameters": 100,
    "trained_shapes": [[5]], "job": "12",
}  # fmt: skip
TRAIN = {
    "event": "train", "step": 15, "epoch": 1.5, "samples_seen": 960, "loss": 0.5, "data_loss": 0.4, "lr": 0.1,
    "gradient_norm": 1.0, "examples_per_sec": 640.0, "sec_per_step": 0.1, "data_sec": 0.01, "comm_sec": 0.02,
}  # fmt: skip
EVAL = {"event": "eval", "step": 15, "epoch": 1.5, "samples": 100, "seconds": 0.5, "loss": 0.6, "data_loss": 0.5}
CHECKPOINT = {"event": "checkpoint", "step": 15, "path": "checkpoints/step-000000015", "seconds": 0.1, "bytes": 20}
WARNING = {"event": "warning", "step": 15, "message": "rank 1 on n1 is slow"}
END = {"event": "end", "status": "failed", "exit_code": 1, "message": "an error", "stacks": [{"rank": 0, "stack": "x"}]}
EVENTS = [{"time": 1_700_000_000.0 + number, **event} for number, event in enumerate(
    [START, TRAIN, EVAL, CHECKPOINT, WARNING, END]
)]  # fmt: skip


class Tracker:
    """A tracker that drops what it gets."""

    address = "nowhere"

    def start(self, run: TrackedRun) -> None: ...

    def log(self, rows: Sequence[Row]) -> None: ...

    def end(self, status: str, tags: Mapping[str, str], files: Sequence[Path]) -> None: ...


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run directory. Its lease is that of no other host."""
    before = lease.EXPIRY_SECONDS
    lease.EXPIRY_SECONDS = 0.05
    path = tmp_path_factory.mktemp("pristine") / "run"
    make_run(path)
    write_events(path, EVENTS)
    yield path
    lease.EXPIRY_SECONDS = before


def write_events(path: Path, events: Sequence[Mapping[str, Any]]) -> None:
    lines = [json.dumps(event) + "\n" for event in events]
    (path / METRICS_FILE).write_text("".join(lines), encoding="utf-8", errors="surrogatepass")


def report(path: Path) -> None:
    write_report([path], path / "other.html")


def track(path: Path) -> None:
    Feed(path, "mine", tracker=Tracker()).send()


def show_status(path: Path) -> None:
    status.draw(path.parent)


def resume(path: Path) -> None:
    from ringtrain.config import Config

    open_run(Config(out=path, epochs=2, batch_size=16)).directory.close()


def read_for_eval_and_export(path: Path) -> None:
    read_settings("eval", RunOptions(path), [str(path)], read_world({}))


def read_for_restarts(path: Path) -> None:
    read_config(path)


READERS: list[Callable[[Path], None]] = [
    report,
    track,
    show_status,
    read_for_eval_and_export,
    read_for_restarts,
    resume,  # the last one, since it writes
]


@dataclass(frozen=True)
class Change:
    """A wrong value for some fields of a file."""

    file: str
    event: int = 0  # of metrics.jsonl
    fields: tuple[str, ...] = ()

    def write(self, path: Path, value: Any) -> None:
        if self.file == METRICS_FILE:
            events = [dict(event) for event in EVENTS]
            events[self.event].update(dict.fromkeys(self.fields, value))
            write_events(path, events)
            return
        file = path / self.file
        values = yaml.safe_load(file.read_text())
        values.update(dict.fromkeys(self.fields, value))
        is_yaml = self.file == CONFIG_FILE
        text = yaml.safe_dump(values) if is_yaml else json.dumps(values)
        file.write_text(text, encoding="utf-8", errors="surrogatepass")


def fields_of(path: Path, file: str) -> list[str]:
    return list(yaml.safe_load((path / file).read_text()))


def read_all(pristine: Path, changes: Sequence[Change], value: Any) -> None:
    """Read a changed copy in each way; only our own errors, of one line, may be raised."""
    for change in changes:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "run"
            shutil.copytree(pristine, path)
            change.write(path, value)
            for read in READERS:
                with contextlib.suppress(RingtrainError):
                    read(path)


@pytest.mark.parametrize("value", WRONG_VALUES.values(), ids=WRONG_VALUES.keys())
def test_a_wrong_value_in_all_fields_of_an_event_is_answered(pristine: Path, value: Any) -> None:
    changes = []
    for number, event in enumerate(EVENTS):
        fields = tuple(name for name in event if name != "event")
        changes.append(Change(METRICS_FILE, number, fields))
    read_all(pristine, changes, value)


@pytest.mark.slow
@pytest.mark.parametrize("value", WRONG_VALUES.values(), ids=WRONG_VALUES.keys())
def test_a_wrong_value_in_each_field_of_an_event_is_answered(pristine: Path, value: Any) -> None:
    changes = []
    for number, event in enumerate(EVENTS):
        changes += [Change(METRICS_FILE, number, (name,)) for name in event if name != "event"]
    read_all(pristine, changes, value)


@pytest.mark.parametrize("value", WRONG_VALUES.values(), ids=WRONG_VALUES.keys())
def test_a_wrong_value_in_each_field_of_an_identity_is_answered(pristine: Path, value: Any) -> None:
    read_all(pristine, [Change(IDENTITY_FILE, fields=(name,)) for name in fields_of(pristine, IDENTITY_FILE)], value)


@pytest.mark.slow
@pytest.mark.parametrize("value", WRONG_VALUES.values(), ids=WRONG_VALUES.keys())
def test_a_wrong_value_in_each_setting_is_answered(pristine: Path, value: Any) -> None:
    read_all(pristine, [Change(CONFIG_FILE, fields=(name,)) for name in fields_of(pristine, CONFIG_FILE)], value)
