"""Which run a checkpoint is of, and where the checkpoints of a run have gone."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringtrain.commands import export
from ringtrain.config import Config
from ringtrain.errors import DataError, RingtrainError, UsageError
from ringtrain.messages.log import show_log
from ringtrain.run.checkpoint import MANIFEST_FILE, digest_of
from ringtrain.run.directory import (
    IDENTITY_FILE,
    as_identity,
    describe_identity,
    draw_identity,
    read_identity,
    require_own,
)
from ringtrain.run.resume import Start, open_run
from ringtrain.run.store import step_name
from ringtrain.runtime.world import read_world
from tests.unit.test_resume import make_run, read_files


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(out=tmp_path / "run", epochs=2, batch_size=16)


def open_quietly(config: Config) -> dict[str, Any]:
    """Open a run about which there is nothing to be said; returns its identity."""
    said: list[str] = []
    with show_log(said.append):
        opened = open_run(config)
    opened.directory.close()
    assert said == []
    return dict(opened.identity)


def change_facts(run: Path, step: int, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change what a checkpoint says of its run, with the right checksum."""
    path = run / "checkpoints" / step_name(step)
    content = json.loads((path / MANIFEST_FILE).read_text())["content"]
    change(content["run"])
    (path / MANIFEST_FILE).write_text(json.dumps({"sha256": digest_of(content), "content": content}))
    return path


def sign(run: Path, steps: list[int], identity: dict[str, Any] | None = None) -> None:
    """Give checkpoints the identity of their run, as training does."""
    for step in steps:
        change_facts(run, step, lambda facts: facts.update(identity=identity or read_identity(run)))


# --- The identity ---


def test_a_run_keeps_the_identity_of_its_first_start(config: Config) -> None:
    run = make_run(config, [2, 4])
    first = read_identity(run)
    assert first is not None
    assert first["seed"] == config.seed
    sign(run, [2, 4])
    assert open_quietly(config) == first
    assert read_identity(run) == first


def test_a_new_run_has_a_new_identity(config: Config, tmp_path: Path) -> None:
    make_run(config, [2])
    first = read_identity(tmp_path / "run")
    assert open_quietly(replace(config, resume="never"))["id"] != (first or {})["id"]
    assert draw_identity(0)["id"] != draw_identity(0)["id"]


def test_a_run_that_never_saved_anything_is_a_new_one(config: Config) -> None:
    make_run(config, [])
    opened = open_run(replace(config, seed=5))
    opened.directory.close()
    assert opened.identity["seed"] == 5
    assert read_identity(opened.directory.path) == opened.identity


@pytest.mark.parametrize("content", [None, "", "[" * 100_000, '{"id": 3}', '{"id": "../x"}', "null"])
def test_a_lost_identity_is_restored_from_the_newest_checkpoint(config: Config, content: str | None) -> None:
    run = make_run(config, [2, 4])
    first = read_identity(run)
    sign(run, [2, 4])
    (run / IDENTITY_FILE).unlink()
    if content is not None:
        (run / IDENTITY_FILE).write_text(content)
    assert open_quietly(config) == first
    assert read_identity(run) == first


def test_a_run_of_an_older_version_gets_an_identity(config: Config) -> None:
    run = make_run(config, [2, 4])  # whose manifests have none
    (run / IDENTITY_FILE).unlink()
    drawn = open_quietly(config)
    assert as_identity(drawn) == drawn
    assert open_quietly(config) == drawn


def test_a_shown_identity_contains_no_unsafe_text() -> None:
    drawn = draw_identity(3)
    assert as_identity(drawn) == drawn
    assert re.fullmatch(r"run [0-9a-f]{8} \(seed 3, started 20\S+Z on [\w.-]+\)", describe_identity(drawn))
    for name, value in (("host", "a\nringtrain: error: b"), ("host", ""), ("seed", 1.5), ("id", "x"), ("started", 0)):
        assert as_identity({**drawn, name: value}) is None
    assert as_identity({**drawn, "more": 1}) is None


# --- A checkpoint of another run ---


def test_a_foreign_checkpoint_is_refused_with_both_identities(config: Config, tmp_path: Path) -> None:
    run = make_run(config, [2, 4])
    sign(run, [2, 4])
    other = make_run(replace(config, out=tmp_path / "other", seed=7), [6])
    sign(other, [6])
    shutil.copytree(other / "checkpoints" / step_name(6), run / "checkpoints" / step_name(6))
    before = read_files(run)
    with pytest.raises(UsageError) as raised:
        open_run(config)
    message = str(raised.value)
    assert describe_identity(read_identity(run)) in message
    assert describe_identity(read_identity(other)) in message
    assert "seed 0" in message
    assert "seed 7" in message
    assert f"--init_from {run / 'checkpoints' / step_name(6)}" in message
    assert read_files(run) == before

    shutil.rmtree(run / "checkpoints" / step_name(6))
    assert open_quietly(config) == read_identity(run)


def test_eval_and_export_take_the_runs_own_checkpoints(config: Config, tmp_path: Path) -> None:
    run = make_run(config, [2])
    sign(run, [2])
    other = make_run(replace(config, out=tmp_path / "other"), [6])
    path = run / "checkpoints" / step_name(6)
    shutil.copytree(other / "checkpoints" / step_name(6), path)
    assert require_own(run, path) == path  # an older ringtrain's says nothing
    sign(run, [6], read_identity(other))
    assert require_own(run, path.with_name(step_name(2)))
    with pytest.raises(UsageError) as raised:
        require_own(run, path)
    assert f"{str(path)!r} is of {describe_identity(read_identity(other))}" in str(raised.value)
    with pytest.raises(UsageError, match=r"is of run .* Put it back into the directory of its run"):
        export.main([str(run), "--checkpoint", step_name(6)], read_world({}))


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (0, r"is of another run: it is of run .*--init_from"),  # with an identity
        (7, r"of another run with other settings \(seed 7 -> 0\).*older ringtrain"),  # without one
    ],
)
def test_a_foreign_checkpoint_is_known_by_its_identity_or_settings(
    config: Config, tmp_path: Path, seed: int, message: str
) -> None:
    run = make_run(config, [2])
    other = make_run(replace(config, out=tmp_path / "other", seed=seed), [6])
    sign(other, [6] if not seed else [])
    shutil.copytree(other / "checkpoints" / step_name(6), run / "checkpoints" / step_name(6))
    with pytest.raises(UsageError, match=message):
        open_run(config)


def test_a_copied_run_keeps_its_identity(config: Config, tmp_path: Path) -> None:
    run = make_run(config, [2, 4])
    sign(run, [2, 4])
    shutil.copytree(run, tmp_path / "copied")
    assert open_quietly(replace(config, out=tmp_path / "copied")) == read_identity(run)


# --- Checkpoints that have gone ---


# What has come in place of the directory of checkpoints; empty, as a mount point is where nothing is mounted.
GONE: dict[str, Callable[[Path], object]] = {
    "is not there": lambda root: None,
    "holds none": Path.mkdir,
    "is a link to 'gone', which is not there": lambda root: root.symlink_to("gone"),
    "is a file": Path.touch,
}


@pytest.mark.parametrize("resume", ["auto", "must"])
@pytest.mark.parametrize("why", GONE)
def test_a_run_without_its_checkpoints_is_refused_unchanged(config: Config, why: str, resume: Any) -> None:
    run = make_run(config, [2, 4])
    shutil.rmtree(run / "checkpoints")
    GONE[why](run / "checkpoints")
    before = read_files(run)
    for _ in range(2):
        with pytest.raises(DataError, match=rf"the newest of step 4 .*checkpoints' {why}\. .*--resume never") as raised:
            open_run(replace(config, resume=resume))
        assert raised.value.exit_code == 3
    assert read_files(run) == before


def test_resume_never_starts_a_new_run_next_to_it(config: Config, tmp_path: Path) -> None:
    run = make_run(config, [2, 4])
    shutil.rmtree(run / "checkpoints")
    before = read_files(run)
    opened = open_run(replace(config, resume="never"))
    opened.directory.close()
    assert opened.start.path == str(tmp_path / "run-2")
    assert read_files(run) == before


def test_a_run_resumes_from_restored_checkpoints(config: Config, tmp_path: Path) -> None:
    run = make_run(config, [2, 4])
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError):
        open_run(config)
    (tmp_path / "elsewhere").rename(run / "checkpoints")
    opened = open_run(config)
    opened.directory.close()
    assert opened.start.step == 4


def test_a_run_that_saved_only_a_best_starts_from_the_beginning(config: Config) -> None:
    opened = open_run(config)
    opened.directory.write_event("checkpoint", step=3, path="checkpoints/best-step-000000003")
    opened.directory.close()
    said: list[str] = []
    with show_log(said.append):
        opened = open_run(config)
    opened.directory.close()
    assert (len(said), opened.start) == (1, Start(path=str(config.out)))


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "profile"])
@pytest.mark.parametrize("kind", ["a link to nowhere", "a file"])
def test_write_access_is_checked_at_the_start(config: Config, name: str, kind: str) -> None:
    run = make_run(config, [])
    if kind == "a file":
        (run / name).write_text("")
    else:
        (run / name).symlink_to("gone")
    before = read_files(run)
    with pytest.raises(UsageError, match=rf"nothing can be written into '.*{name}', as this run has to: .*--out"):
        open_run(replace(config, profile="1:2"))
    assert read_files(run) == before


def test_write_access_to_unused_paths_is_not_checked(config: Config) -> None:
    run = make_run(config, [2])
    (run / "profile").write_text("")
    open_quietly(config)


def test_no_refusal_is_a_traceback(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the file system says."""
    run = make_run(config, [2])

    def fail(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("ringtrain.run.store.list_steps", fail)
        with pytest.raises(RingtrainError, match=r"checkpoints' cannot be read: Permission denied\."):
            open_run(config)
    assert (run / "checkpoints" / step_name(2)).is_dir()
