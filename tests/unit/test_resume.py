"""A run directory opened: a fresh run, one that resumes where it was, or one that is complete."""

import json
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml

from ringtrain.config import Config, OptimizerConfig, to_plain
from ringtrain.errors import DataError, UsageError
from ringtrain.messages.log import show_log
from ringtrain.run.checkpoint import MANIFEST_FILE, VARIABLES_FILE, Checkpoint
from ringtrain.run.directory import CONFIG_FILE, METRICS_FILE
from ringtrain.run.lease import LEASE_DIRECTORY
from ringtrain.run.resume import (
    FREE_SETTINGS,
    LENGTH_SETTINGS,
    OpenedRun,
    Progress,
    Start,
    choose_directory,
    describe_way_on,
    is_finished,
    open_run,
    refuse_other_settings,
)
from ringtrain.run.store import list_steps, step_name, write_checkpoint
from tests.unit.test_lease import Process

Finished = Literal["completed", "stopped early"]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(out=tmp_path / "run", epochs=2, batch_size=16)


def open_quietly(config: Config) -> OpenedRun:
    """Open a run about which there is nothing to be said."""
    said: list[str] = []
    with show_log(said.append):
        opened = open_run(config)
    assert said == []
    return opened


def make_run(config: Config, steps: list[int], finished: Finished | None = None) -> Path:
    """A run that saved these steps and ended at the last."""
    opened = open_quietly(config)
    run = opened.directory
    run.write_event("start", step=0)
    for step in range(1, max(steps, default=0) + 1):
        run.write_event("train", step=step)
        if step in steps:
            save(run.checkpoints, config, step, finished if step == steps[-1] else None)
            run.write_event("checkpoint", step=step)
    run.write_event("end", status="completed" if finished else "preempted")
    run.close()
    return run.path


def save(root: Path, config: Config, step: int, finished: Finished | None = None) -> Path:
    checkpoint = Checkpoint(
        step=step,
        variables={"weights/w": np.full((5,), step, np.float32)},
        progress=asdict(Progress(best=1 / step, best_step=step, evaluated_step=step, finished=finished)),
        run={"global_batch_size": 64, "world_size": 1, "config": to_plain(asdict(config))},
    )
    return write_checkpoint(root, checkpoint, is_best=False)


def damage(run: Path, step: int) -> Path:
    file = run / "checkpoints" / step_name(step) / VARIABLES_FILE
    file.write_bytes(file.read_bytes()[:-1])
    return file.parent


def read_files(run: Path) -> dict[str, tuple[bytes, int, int]]:
    """All files of a run but those of its lease: content, number and time of the last change."""
    return {
        str(path.relative_to(run)): (path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns)
        for path in run.rglob("*")
        if path.is_file() and path.parent.name != LEASE_DIRECTORY
    }


def read_events(run: Path) -> list[tuple[str, int | None]]:
    events = [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()]
    return [(event["event"], event.get("step")) for event in events]


def read_settings(run: Path) -> Any:
    return yaml.safe_load((run / CONFIG_FILE).read_text())


# --- A fresh run ---


def test_a_fresh_run_begins_at_step_0_and_keeps_its_settings(config: Config) -> None:
    opened = open_quietly(config)
    run = opened.directory.path
    assert opened.checkpoint is None
    assert opened.start == Start(path=str(config.out))
    assert read_settings(run) == to_plain(asdict(config))
    opened.directory.write_event("start")
    assert read_events(run) == [("start", None)]
    opened.directory.close()


def test_a_start_is_json(config: Config) -> None:
    make_run(config, [2])
    opened = open_quietly(config)
    opened.directory.close()
    assert Start(**json.loads(json.dumps(asdict(opened.start)))) == opened.start


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_directory_that_is_no_run_is_refused_and_left_alone(
    config: Config, tmp_path: Path, resume: Literal["auto", "must"]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="not empty and holds no run" if resume == "auto" else "holds no run"):
        open_run(replace(config, resume=resume))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("workload", "name"),
    [("digits", "digits"), ("package.module:Class", "class"), ("path/to/file.py:Class", "class"), ("Digits", "digits")],
)
def test_without_out_the_workload_names_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_directory(Config(workload=workload)) == Path("runs", name)
    assert (tmp_path / "runs" / name).is_dir()


def test_a_run_killed_before_its_first_checkpoint_starts_again_with_any_settings(config: Config) -> None:
    opened = open_quietly(config)
    opened.directory.write_event("start", step=0)
    for step in (1, 2):
        opened.directory.write_event("train", step=step)
    opened.directory.close()
    said: list[str] = []
    with show_log(said.append):
        opened = open_run(replace(config, batch_size=32))
    assert said == [f"the run in {config.out} holds no checkpoint yet: it starts from the beginning"]
    assert opened.start == Start(path=str(config.out))
    assert read_events(opened.directory.path) == [("start", 0)]
    assert read_settings(opened.directory.path)["batch_size"] == 32
    opened.directory.close()


# --- A run that goes on ---


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_run_resumes_from_its_latest_checkpoint(config: Config, resume: Literal["auto", "must"]) -> None:
    run = make_run(config, [2, 4])
    opened = open_quietly(replace(config, resume=resume))
    progress = asdict(Progress(best=1 / 4, best_step=4, evaluated_step=4))
    assert opened.start == Start(path=str(run), step=4, global_batch_size=64, size=1, progress=progress)
    assert opened.checkpoint is not None
    np.testing.assert_array_equal(opened.checkpoint.variables["weights/w"], np.full((5,), 4, np.float32))
    opened.directory.close()


def test_steps_after_the_checkpoint_are_forgotten(config: Config) -> None:
    run = make_run(config, [2, 4, 5])
    shutil.rmtree(run / "checkpoints" / step_name(5))
    open_quietly(config).directory.close()
    assert [step for event, step in read_events(run) if event == "train"] == [1, 2, 3, 4]
    assert [step for event, step in read_events(run) if event == "checkpoint"] == [2, 4]
    assert [event for event, _ in read_events(run)].count("end") == 1


def test_leftovers_of_a_killed_process_are_removed(config: Config) -> None:
    run = make_run(config, [2, 4])
    root = run / "checkpoints"
    (root / ".writing-step-000000006").mkdir()
    (root / step_name(4)).rename(root / f".replaced-{step_name(4)}")
    opened = open_quietly(config)
    opened.directory.close()
    assert opened.start.step == 4
    assert {path.name for path in root.iterdir()} == {step_name(2), step_name(4)}


def test_must_without_a_run_is_refused_and_writes_nothing(config: Config, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"resume is 'must', but '.*/run' holds no run.*--out"):
        open_run(replace(config, resume="must"))
    assert list(tmp_path.iterdir()) == []


def test_must_without_a_checkpoint_is_refused(config: Config) -> None:
    run = make_run(config, [])
    before = read_files(run)
    with pytest.raises(UsageError, match=r"resume is 'must'.*holds no checkpoint yet"):
        open_run(replace(config, resume="must"))
    assert read_files(run) == before


def test_never_starts_a_new_run_next_to_the_old_one(config: Config, tmp_path: Path) -> None:
    run = make_run(config, [2])
    before = read_files(run)
    for number in (2, 3):
        opened = open_quietly(replace(config, resume="never", seed=number))
        assert opened.start == Start(path=str(tmp_path / f"run-{number}"))
        opened.directory.close()
    assert read_files(run) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-2", "run-3"]


# --- Other settings ---


def test_another_setting_is_refused_with_both_values(config: Config) -> None:
    run = make_run(config, [2])
    before = read_files(run)
    other = replace(config, seed=7, precision="float64", optimizer=OptimizerConfig(lr=0.5), log_every=1)
    for _ in range(2):  # the second would be refused by the first's lease
        with pytest.raises(UsageError) as raised:
            open_run(other)
        message = str(raised.value)
        assert "optimizer.lr 0.01 -> 0.5; precision float32 -> float64; seed 0 -> 7. Give" in message
        assert "log_every" not in message
        assert "--resume never" in message
    assert read_files(run) == before


def test_free_settings_may_change(config: Config, tmp_path: Path) -> None:
    run = make_run(config, [2])
    other = replace(
        config,
        backend="solo", check_replicas_every=2, checkpoint_every=7, data_dir=tmp_path, eval_every=3,
        eval_every_epochs=5, keep=9, log_every=1, on_nonfinite="skip", stop_after=4,
    )  # fmt: skip
    opened = open_quietly(other)
    assert opened.start.step == 2
    opened.directory.close()
    assert read_settings(run) == to_plain(asdict(other))


def test_every_setting_is_either_free_or_refused() -> None:
    settings = to_plain(asdict(Config(epochs=2)))
    names = {field.name for field in fields(Config)} - {"optimizer", "options"}
    assert names >= FREE_SETTINGS | LENGTH_SETTINGS
    for name in names:
        changed = {**settings, name: "other"}
        if name in FREE_SETTINGS | LENGTH_SETTINGS:
            refuse_other_settings(Path("run"), settings, changed)
        else:
            with pytest.raises(UsageError, match=f"settings: {name} {settings[name]} -> other\\. Give"):
                refuse_other_settings(Path("run"), settings, changed)
    for field in fields(OptimizerConfig):
        changed = {**settings, "optimizer": {**settings["optimizer"], field.name: "other"}}
        with pytest.raises(UsageError, match=f"settings: optimizer\\.{field.name} .* -> other\\. Give"):
            refuse_other_settings(Path("run"), settings, changed)


def test_a_workload_s_options_are_refused_when_they_change() -> None:
    former = to_plain(asdict(Config(options={"width": 64, "depth": 2})))
    with pytest.raises(UsageError, match=r"settings: options\.width 64 -> 32\. Give"):
        refuse_other_settings(Path("run"), former, to_plain(asdict(Config(options={"width": 32, "depth": 2}))))


def test_a_setting_missing_in_an_older_run_has_its_default() -> None:
    former = to_plain(asdict(Config(epochs=2)))
    del former["precision"], former["optimizer"]["ema"]
    refuse_other_settings(Path("run"), former, to_plain(asdict(Config(epochs=2))))
    with pytest.raises(UsageError, match="settings: precision float32 -> float64"):
        refuse_other_settings(Path("run"), former, to_plain(asdict(Config(epochs=2, precision="float64"))))


def test_the_same_settings_are_the_same_after_they_were_kept(config: Config) -> None:
    optimizer = OptimizerConfig(name="adamw", lr=1e-05, decay_rate=1 / 3, weight_decay=1e-300, warmup_epochs=3)
    same = replace(config, optimizer=optimizer, seed=2**32 - 1, workload="yes", best_metric="1e3")
    make_run(same, [2])
    open_quietly(same).directory.close()


@pytest.mark.parametrize("length", [{"epochs": 5}, {"epochs": None, "steps": 100}])
def test_a_run_may_be_longer_than_planned(config: Config, length: dict[str, Any]) -> None:
    make_run(config, [2])
    opened = open_quietly(replace(config, **length))
    assert (opened.start.step, opened.start.is_complete) == (2, False)
    opened.directory.close()


def test_a_run_with_a_cosine_schedule_cannot_be_extended(config: Config) -> None:
    cosine = replace(config, optimizer=OptimizerConfig(schedule="cosine"))
    make_run(cosine, [2])
    with pytest.raises(UsageError, match=r"settings: epochs 2 -> 5\."):
        open_run(replace(cosine, epochs=5))
    open_quietly(cosine).directory.close()


@pytest.mark.parametrize("content", [b"", b"optimizer: [", b"workload: digits\n", b"\xff\xfe"])
def test_a_run_with_a_damaged_configuration_is_refused_unchanged(config: Config, content: bytes) -> None:
    run = make_run(config, [2])
    (run / CONFIG_FILE).write_bytes(content)
    before = read_files(run)
    with pytest.raises(UsageError, match=f"{CONFIG_FILE}.*is damaged"):
        open_run(config)
    assert read_files(run) == before


# --- Damaged checkpoints ---


def test_if_the_newest_is_damaged_the_one_before_is_used(config: Config) -> None:
    run = make_run(config, [2, 4, 6])
    damaged = {step: (damage(run, step) / VARIABLES_FILE).read_bytes() for step in (4, 6)}
    said: list[str] = []
    with show_log(said.append):
        opened = open_run(config)
    opened.directory.close()
    assert opened.start.step == 2
    assert opened.start.progress["best_step"] == 2
    root = run / "checkpoints"
    assert [step for event, step in read_events(run) if event == "train"] == [1, 2]
    assert list_steps(root) == [2]
    for step, data in damaged.items():
        kept = root / f"{step_name(step)}.damaged-1"
        assert (kept / VARIABLES_FILE).read_bytes() == data
        assert f"warning: the damaged checkpoint is kept as {kept}" in said
        file = str(root / step_name(step) / VARIABLES_FILE)
        assert any(line.startswith("warning: ") and file in line and "must hold" in line for line in said)
    assert len(said) == 4


def test_a_run_with_only_damaged_checkpoints_is_refused(config: Config) -> None:
    run = make_run(config, [2, 4])
    for step in (2, 4):
        damage(run, step)
    before = read_files(run)
    for _ in range(2):
        with pytest.raises(DataError, match="2 checkpoints, and none is whole") as raised:
            open_run(config)
        assert raised.value.exit_code == 3
    assert read_files(run) == before


def test_a_checkpoint_of_a_newer_version_is_refused_unchanged(config: Config) -> None:
    run = make_run(config, [2, 4])
    manifest = run / "checkpoints" / step_name(4) / MANIFEST_FILE
    manifest.write_text('{"content": {"format": 99}, "sha256": ""}')
    before = read_files(run)
    with pytest.raises(DataError, match="update ringtrain"):
        open_run(config)
    assert read_files(run) == before


# --- A run that is complete ---


@pytest.mark.parametrize("finished", ["completed", "stopped early"])
def test_a_finished_run_is_complete_and_nothing_is_rewritten(config: Config, finished: Finished) -> None:
    run = make_run(config, [2, 4], finished)
    before = read_files(run)
    for resume in ("auto", "must"):
        opened = open_quietly(replace(config, resume=resume, log_every=3))
        assert opened.start.is_complete
        assert opened.start.step == 4
        opened.directory.close()
        assert read_files(run) == before


def test_a_finished_run_can_be_extended(config: Config) -> None:
    make_run(config, [2, 4], "completed")
    for _ in range(2):  # the first is killed before it saves anything
        opened = open_quietly(replace(config, epochs=5))
        assert not opened.start.is_complete
        assert opened.start.progress["finished"] is None
        opened.directory.close()


def test_a_finished_run_whose_end_is_damaged_is_not_complete(config: Config) -> None:
    run = make_run(config, [2, 4], "completed")
    damage(run, 4)
    opened = open_run(config)
    assert (opened.start.step, opened.start.is_complete) == (2, False)
    opened.directory.close()


@pytest.mark.parametrize(
    ("finished", "change", "expected"),
    [
        (None, {}, False),
        ("completed", {}, True),
        ("stopped early", {}, True),
        ("completed", {"log_every": 7, "keep": 2}, True),
        ("completed", {"epochs": 3}, False),
        ("completed", {"epochs": None, "steps": 50}, False),
    ],
)
def test_a_run_is_finished_only_at_its_configured_length(
    config: Config, finished: str | None, change: dict[str, Any], expected: bool
) -> None:
    run = {"config": to_plain(asdict(config))}
    checkpoint = Checkpoint(step=4, variables={}, progress={"finished": finished}, run=run)
    assert is_finished(checkpoint, replace(config, **change)) is expected


# --- One writer ---


def test_a_run_written_by_another_process_is_refused_unchanged(config: Config) -> None:
    run = make_run(config, [2])
    (run / "checkpoints/.writing-step-000000004").mkdir()
    (run / "checkpoints/.writing-step-000000004" / VARIABLES_FILE).write_bytes(b"half")
    before = read_files(run)
    other = Process(run)
    with other.popen:
        other.hold()
        with pytest.raises(UsageError, match=f"process {other.pid} on"):
            open_run(config)
        assert read_files(run) == before
        other.popen.kill()
    opened = open_quietly(config)  # that of a dead process is taken at once
    assert opened.start.step == 2
    opened.directory.close()


def test_a_numbered_run_gives_its_path_for_resuming() -> None:
    run = Path("runs/digits-2")
    assert describe_way_on(Config(), run) == "The same command resumes from there."
    assert describe_way_on(Config(resume="never"), run) == (
        "To resume from there, add to the same command: --out runs/digits-2 --resume auto"
    )
