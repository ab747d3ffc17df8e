"""The best checkpoint: which one it is, and that those before it do not pile up."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from ringtrain.messages.log import show_log
from ringtrain.run import store
from ringtrain.run.directory import RunDirectory
from ringtrain.run.lease import LeaseLostError, acquire_lease
from ringtrain.run.store import BEST, find_best, step_name, tidy
from ringtrain.training.saving import CheckpointWriter
from tests.unit.checkpoints import make_checkpoint, read_tree, save


def test_only_the_newest_of_several_bests_is_kept(tmp_path: Path) -> None:
    """As each is better than those before it; a copy of a run may hold several."""
    assert find_best(tmp_path / "absent") is None
    for step in (1, 2, 10):
        save(tmp_path, step, is_best=True)
    (tmp_path / f"best-{step_name(11)}").write_text("no directory")
    assert find_best(tmp_path) == tmp_path / f"best-{step_name(10)}"
    tidy(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [f"best-{step_name(10)}"]


def test_a_new_best_of_an_earlier_step_replaces_a_later_one(tmp_path: Path) -> None:
    """A run resumed from an older checkpoint than the best one."""
    save(tmp_path, 9, is_best=True)
    save(tmp_path, 7)
    assert find_best(tmp_path) == tmp_path / f"best-{step_name(9)}"
    save(tmp_path, 8, is_best=True)
    assert {path.name for path in tmp_path.iterdir()} == {step_name(7), f"best-{step_name(8)}"}


@pytest.mark.parametrize("name", [step_name(1), f"best-{step_name(1)}"])
def test_tidying_a_linked_checkpoint_removes_only_the_link(tmp_path: Path, name: str) -> None:
    archive, root = tmp_path / "archive", tmp_path / "checkpoints"
    for step in (1, 2):
        save(root, step, is_best=name.startswith(BEST))
    (root / name).rename(archive)
    (root / name).symlink_to(archive)
    before = read_tree(archive)
    tidy(root, 1)
    assert not (root / name).is_symlink()
    assert read_tree(archive) == before
    assert list(root.glob(".*")) == []


def test_a_step_saved_again_replaces_a_link_not_its_target(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save(root, 1).rename(tmp_path / "archive")
    (root / step_name(1)).symlink_to(tmp_path / "archive")
    before = read_tree(tmp_path / "archive")
    save(root, 1)
    assert not (root / step_name(1)).is_symlink()
    assert read_tree(tmp_path / "archive") == before
    assert list(root.glob(".*")) == []


# --- As a run writes them ---


def test_a_run_directory_moved_during_training_is_not_recreated(tmp_path: Path) -> None:
    """It would be half a run, which the next start refuses."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    lease = acquire_lease(run, environ={})
    directory = RunDirectory(run, may_write=lease.check, on_close=lease.close)
    writer = CheckpointWriter(directory, keep=2, last_step=0)
    run.rename(moved)
    writer.save(make_checkpoint(1), as_step=True, as_best=True)
    with pytest.raises(LeaseLostError, match=rf"'{run}' cannot be read any more: No such file .* bring it back"):
        writer.wait()
    with pytest.raises(LeaseLostError):
        writer.finish(make_checkpoint(2))
    directory.close()
    assert not run.exists()
    assert {path.name for path in moved.iterdir()} == {".lease", "metrics.jsonl"}


def write_bests(run: Path, steps: range, *, keep: int) -> list[str]:
    """Save these steps, each the best so far, as a run does; returns what the user is told."""
    said: list[str] = []
    directory = RunDirectory(run)
    writer = CheckpointWriter(directory, keep=keep, last_step=steps[0] - 1)
    with show_log(said.append):
        for step in steps:
            writer.save(make_checkpoint(step), as_step=True, as_best=True)
        writer.finish(make_checkpoint(steps[-1]))
    directory.close()
    return said


def test_a_copied_run_resumes_with_its_number_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert write_bests(tmp_path / "run", range(1, 5), keep=2) == []
    shutil.copytree(tmp_path / "run", tmp_path / "copied")
    assert write_bests(tmp_path / "copied", range(5, 9), keep=2) == []
    best = f"best-{step_name(8)}"
    names = {path.name for path in (tmp_path / "copied/checkpoints").iterdir()}
    assert names == {step_name(7), step_name(8), best}
    events = [json.loads(line) for line in (tmp_path / "copied/metrics.jsonl").read_text().splitlines()]
    assert {event["event"] for event in events} == {"checkpoint"}


def test_failures_to_remove_or_keep_a_best_are_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is saved stands, whatever becomes of its neighbours."""

    def refuse(path: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(store, "_remove", refuse)
        said = write_bests(tmp_path / "run", range(1, 3), keep=1)
    root = str(tmp_path / "run/checkpoints")
    assert set(said) == {f"warning: what --keep 1 leaves out below {root!r} cannot be removed: Permission denied."}

    (tmp_path / "run/checkpoints/best-step-000000009").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(store, "_remove", refuse)
        [first, *_] = write_bests(tmp_path / "run", range(3, 5), keep=9)
    assert f"the best checkpoint of step 3 cannot be written below {root!r}: Permission denied." in first
    assert "The best one before it is kept." in first
    rename = store._rename_over

    def refuse_best(source: Path, target: Path) -> None:
        refuse(target) if target.name.startswith(BEST) else rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(store, "_rename_over", refuse_best)
        (tmp_path / "none").mkdir()
        [first, *_] = write_bests(tmp_path / "none", range(1, 2), keep=1)
    assert first.endswith("There was no best one before it.")
    events = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [event["path"] for event in events if event["event"] == "checkpoint" and event["step"] == 3] == [
        f"checkpoints/{step_name(3)}"
    ]
