"""Data that are damaged, vanish or differ while a run trains: what is wrong is named, and nothing good is lost."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from ringtrain.run.checkpoint import read_checkpoint
from ringtrain.run.store import list_steps, step_name
from tests.faults.images import CLASSES, make_images
from tests.world.running import events, running

WORKLOAD = "tests.faults.images:Folder"
ANSWER_SECONDS = 30
NODE = re.escape(socket.gethostname())
Record = Callable[[str, Any], None]


def all_files(data: Path) -> list[Path]:
    return sorted((data / "train").rglob("*.png"))


def empty_one(data: Path) -> None:
    all_files(data)[7].write_bytes(b"")


def cut_one(data: Path) -> None:
    path = all_files(data)[7]
    path.write_bytes(path.read_bytes()[:40])


def replace_one(data: Path) -> None:
    all_files(data)[7].write_bytes(b"<html>404 Not Found</html>")


def resize_one(data: Path) -> None:
    all_files(data)[7].write_bytes(tf.io.encode_png(tf.zeros([5, 9, 3], tf.uint8)).numpy())


def remove_one(data: Path) -> None:
    all_files(data)[7].unlink()


def remove_class(data: Path) -> None:
    shutil.rmtree(data / "train" / CLASSES[0])


def remove_all(data: Path) -> None:
    shutil.rmtree(data)


INJURIES = (empty_one, cut_one, replace_one, resize_one, remove_one, remove_class, remove_all)


@pytest.mark.parametrize(
    "injure", [pytest.param(injure, id=injure.__name__, marks=pytest.mark.slow) for injure in INJURIES]
)
def test_data_damaged_during_a_run_stop_it_and_are_named(
    injure: Callable[[Path], None], tmp_path: Path, record_property: Record
) -> None:
    data, out = tmp_path / "data", tmp_path / "run"
    make_images(data)
    path = all_files(data)[7]
    with running(out, "--data_dir", str(data), workload=WORKLOAD) as run:
        run.wait_for_step(7)
        injure(data)
        began = time.monotonic()
        code = run.wait(ANSWER_SECONDS)
        record_property("answer_seconds", round(time.monotonic() - began, 1))
    assert code == 3, run.text()
    assert "Traceback" not in run.text()
    if injure not in (remove_class, remove_all):
        assert str(path) in run.text()
    end = events(out, "end")[-1]
    assert (end["status"], end["exit_code"]) == ("data", 3)
    steps = list_steps(out / "checkpoints")
    assert steps
    for step in steps:
        assert read_checkpoint(out / "checkpoints" / step_name(step)).step == step
    record_property("resumed", False)


@pytest.mark.slow
def test_all_damaged_files_are_listed_for_xargs(tmp_path: Path, record_property: Record) -> None:
    data, out = tmp_path / "data of mine", tmp_path / "run"
    make_images(data)
    damaged = all_files(data)[::3]
    with running(out, "--data_dir", str(data), workload=WORKLOAD) as run:
        run.wait_for_step(7)
        for path in damaged:
            path.write_bytes(b"<html>404 Not Found</html>")
        began = time.monotonic()
        assert run.wait(ANSWER_SECONDS) == 3, run.text()
        record_property("answer_seconds", round(time.monotonic() - began, 1))
    listed = out / "unreadable.txt"
    assert set(listed.read_text().splitlines()) == set(map(str, damaged))
    assert re.search(rf"{len(damaged)} samples cannot be read: .*; and {len(damaged) - 5} more\.", run.text())
    [command] = set(re.findall(r"xargs -d '\\n' rm -- < \S+", run.text()))
    subprocess.run(["bash", "-c", command], check=True, timeout=10)
    assert set(all_files(data)).isdisjoint(damaged)
    assert len(all_files(data)) == 40 - len(damaged)
    record_property("resumed", False)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_with_other_data_is_named_before_the_first_step(
    rank: int, tmp_path: Path, record_property: Record
) -> None:
    data, other, out = tmp_path / "data", tmp_path / "other", tmp_path / "run"
    make_images(data)
    make_images(other)
    remove_one(other)
    odd = json.dumps({"rank": rank, "flags": ["--data_dir", str(other)], "variables": {}})
    start = ["mpirun", "-np", "3", "--oversubscribe", "--bind-to", "none", sys.executable]
    start += ["-m", "tests.world.started_by_rank", odd]
    began = time.monotonic()
    with running(out, "--data_dir", str(data), workload=WORKLOAD, start=start) as run:
        assert run.wait(90) in (2, 3), run.text()
        record_property("answer_seconds", round(time.monotonic() - began, 1))
    assert re.search(rf"rank {rank} on {NODE}", run.text())
    assert "Traceback" not in run.text()
    assert not events(out, "train")
    record_property("resumed", False)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "end", "nothing"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stream_that_fails_on_one_rank_has_a_documented_exit(
    rank: int, fault: str, tmp_path: Path, record_property: Record
) -> None:
    out = tmp_path / "run"
    flags = ["--options.rank", str(rank), "--options.fault", fault, "--steps", "40", "--checkpoint_every", "5"]
    began = time.monotonic()
    with running(out, *flags, workload="tests.faults.feeds:Fed", np=3) as run:
        code = run.wait(90)
        record_property("answer_seconds", round(time.monotonic() - began, 1))
    if fault == "raise":
        assert code == 1, run.text()
        assert f"rank {rank} on" in run.text()
        assert "the fault of the feed" in run.text()
    else:  # whoever has no more joins in with nothing until all have
        assert code == 0, run.text()
        seen = events(out, "train")[-1]["samples_seen"]
        assert seen == {"end": 2 * 40 * 2 + 2 * 10, "nothing": 2 * 40 * 2}[fault]
    assert step_name(5) in [path.name for path in (out / "checkpoints").iterdir()] or code == 0
    record_property("resumed", code == 0)
