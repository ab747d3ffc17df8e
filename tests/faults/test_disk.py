"""A run directory on a disk that is full, read-only or gone: a message says so, and a mended one goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringtrain.run.checkpoint import read_checkpoint
from ringtrain.run.store import list_steps, step_name
from tests.world.running import Run, assert_history_is_whole, events, last_step, run_to_end, running

EPOCHS, STEPS = 6, 48
SLOW_STEP = {"RINGTRAIN_TEST_STEP_SECONDS": "0.05"}
ANSWER_SECONDS = 30
Record = Callable[[str, Any], None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of two megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], check=True)
    yield path
    while subprocess.run(["umount", "--lazy", str(path)], stderr=subprocess.DEVNULL).returncode == 0:
        pass  # a test may have mounted over it


def fill(disk: Path, *, but: int = 0) -> None:
    """Leave no more than some bytes free."""
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    if but:
        os.truncate(disk / "filler", (disk / "filler").stat().st_size - but)


def make_room(disk: Path) -> None:
    (disk / "filler").unlink()


def read_only(disk: Path) -> None:
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)


def writable_again(disk: Path) -> None:
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def move_away(disk: Path) -> None:
    (disk / "run").rename(disk / "elsewhere")


def move_back(disk: Path) -> None:
    assert not (disk / "run").exists(), "half a run was made in its place"
    (disk / "elsewhere").rename(disk / "run")


MENDED: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], str]] = {
    "full": (fill, make_room, os.strerror(errno.ENOSPC)),
    "read-only": (read_only, writable_again, os.strerror(errno.EROFS)),
    "away": (move_away, move_back, os.strerror(errno.ENOENT)),
}


def assert_told(run: Run, code: int, words: str) -> None:
    assert code == 1, run.text()
    assert "Traceback" not in run.text(), run.text()
    told = [line for line in run.text().splitlines() if line.startswith("ringtrain: error: ")]
    assert len(told) == 1, run.text()
    assert words in told[0], run.text()
    assert str(run.out) in told[0]


@pytest.mark.parametrize("what", [pytest.param(what, marks=pytest.mark.slow) for what in MENDED])
def test_a_run_resumes_after_its_failed_disk_is_repaired(what: str, disk: Path, record_property: Record) -> None:
    injure, mend, words = MENDED[what]
    out = disk / "run"
    with running(out, env=SLOW_STEP, log=disk.with_name("log")) as run:
        run.wait_for_checkpoint_after(4)
        run.wait_for_step(8)
        injure(disk)
        began = time.monotonic()
        code = run.wait(ANSWER_SECONDS)
        record_property("answer_seconds", round(time.monotonic() - began, 1))
    assert_told(run, code, words)
    mend(disk)
    run_to_end(out, log=disk.with_name("resumed.log"))
    assert_history_is_whole(out, epochs=EPOCHS, steps=STEPS)
    assert events(out, "start")[-1]["first_step"] >= 5, "the checkpoint is lost"
    record_property("resumed", True)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["full", "read-only"])
def test_a_run_unable_to_write_at_start_fails_and_loses_nothing(what: str, disk: Path, record_property: Record) -> None:
    injure, mend, words = MENDED[what]
    out = disk / "run"
    run_to_end(out, "--steps", "7", log=disk.with_name("first.log"))
    before = {path: path.read_bytes() for path in (out / "checkpoints").rglob("*") if path.is_file()}
    injure(disk)
    began = time.monotonic()
    with running(out, "--steps", "20", log=disk.with_name("log")) as run:
        code = run.wait(60)
        record_property("answer_seconds", round(time.monotonic() - began, 1))
    assert code == 2, run.text()
    assert words in run.text()
    assert "Traceback" not in run.text(), run.text()
    assert {path: path.read_bytes() for path in before} == before
    mend(disk)
    run_to_end(out, "--steps", "20", log=disk.with_name("resumed.log"))
    assert [event["step"] for event in events(out, "train")] == list(range(1, 21))
    record_property("resumed", True)


@pytest.mark.slow
def test_checkpoints_that_do_not_fit_do_not_stop_training(disk: Path, record_property: Record) -> None:
    """What it cannot do without is its last checkpoint, and the record of its last step."""
    out = disk / "run"
    flags = ("--log_every", "1000", "--eval_every_epochs", "0", "--check_replicas_every", "0")
    with running(out, *flags, env=SLOW_STEP, log=disk.with_name("log")) as run:
        run.wait_for_checkpoint_after(4)
        fill(disk, but=8192)
        began = time.monotonic()
        code = run.wait(60)
        record_property("answer_seconds", round(time.monotonic() - began, 1))
    assert code == 1, run.text()
    assert re.search(
        r"warning: the checkpoint of step \d+ cannot be written below .* The latest is that of step 5", run.text()
    )
    assert re.search(r"ringtrain: error: .*Make room", run.text())
    assert "Traceback" not in run.text(), run.text()
    saved = list_steps(out / "checkpoints")
    assert read_checkpoint(out / "checkpoints" / step_name(saved[-1])).step == saved[-1]
    make_room(disk)
    run_to_end(out, *flags, log=disk.with_name("resumed.log"))
    record_property("resumed", True)


@pytest.mark.slow
def test_a_run_directory_that_is_removed_ends_the_run(tmp_path: Path, record_property: Record) -> None:
    out = tmp_path / "run"
    with running(out, env=SLOW_STEP) as run:
        run.wait_for_checkpoint_after(4)
        shutil.rmtree(out)
        began = time.monotonic()
        code = run.wait(ANSWER_SECONDS)
        record_property("answer_seconds", round(time.monotonic() - began, 1))
    assert_told(run, code, os.strerror(errno.ENOENT))
    record_property("resumed", False)


LIMITS: dict[str, tuple[int, Callable[[int], int], str]] = {
    "largest file": (resource.RLIMIT_FSIZE, lambda pid: 100, os.strerror(errno.EFBIG)),
    "open files": (
        resource.RLIMIT_NOFILE,
        lambda pid: len(list(Path(f"/proc/{pid}/fd").iterdir())),
        os.strerror(errno.EMFILE),
    ),
}


@pytest.mark.parametrize("what", [pytest.param(what, marks=pytest.mark.slow) for what in LIMITS])
def test_a_process_limit_is_reported_and_nothing_is_lost(what: str, tmp_path: Path, record_property: Record) -> None:
    """Set from outside while the run trains, as a site's administrator may."""
    out = tmp_path / "run"
    number, limit_of, words = LIMITS[what]
    with running(out, env=SLOW_STEP) as run:
        run.wait_for_checkpoint_after(4)
        pid = run.rank_pid(0)
        resource.prlimit(pid, number, (limit_of(pid), resource.prlimit(pid, number)[1]))
        began = time.monotonic()
        code = run.wait(ANSWER_SECONDS)
        record_property("answer_seconds", round(time.monotonic() - began, 1))
    assert code in (0, 1), run.text()
    assert words in run.text(), run.text()
    assert "Traceback" not in run.text(), run.text()
    run_to_end(out, log=tmp_path / "resumed.log")
    assert_history_is_whole(out, epochs=EPOCHS, steps=STEPS)
    assert last_step(out) == STEPS
    record_property("resumed", True)
