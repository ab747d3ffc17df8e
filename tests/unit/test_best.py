"""The best checkpoint survives any copy of its run, and those before it do not pile up."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ringtrain.run import store
from ringtrain.run.checkpoint import read_checkpoint
from ringtrain.run.directory import RunDirectory
from ringtrain.run.lease import LeaseLostError, acquire_lease
from ringtrain.run.store import (
    BEST,
    BEST_FILE,
    find_best,
    find_checkpoint,
    list_steps,
    mend_best,
    remove_unfinished,
    step_name,
    tidy,
)
from tests.unit.checkpoints import assert_is_of_step, make_checkpoint, read_tree, save


def copy_links_followed(source: Path, target: Path) -> None:
    """As ``cp -rL``, ``scp -r`` and ``zip -r`` do."""
    shutil.copytree(source, target, symlinks=False)


def copy_links_left_out(source: Path, target: Path) -> None:
    """As ``rsync -r`` and object stores may do."""
    shutil.copytree(source, target, symlinks=True)
    for path in target.rglob("*"):
        if path.is_symlink():
            path.unlink()


def copy_links_as_text(source: Path, target: Path) -> None:
    """As archives do that a program without links unpacks: a file that holds the target's name."""
    shutil.copytree(source, target, symlinks=True)
    for path in [path for path in target.rglob("*") if path.is_symlink()]:
        name = os.readlink(path)
        path.unlink()
        path.write_text(name)


def zip_and_unzip(source: Path, target: Path) -> None:
    with zipfile.ZipFile(target.with_suffix(".zip"), "w") as archive:
        for path in source.rglob("*"):
            archive.write(path, path.relative_to(source))
    zipfile.ZipFile(target.with_suffix(".zip")).extractall(target)


COPIES: list[Callable[[Path, Path], object]] = [
    copy_links_followed,
    copy_links_left_out,
    copy_links_as_text,
    zip_and_unzip,
    lambda source, target: shutil.copytree(source, target, symlinks=True),
]


def make_run(run: Path, *, is_old: bool) -> Path:
    """A run whose step 2 was the best; ``is_old`` as ringtrain wrote it when only a link said so."""
    root = run / "checkpoints"
    for step in (1, 2, 3):
        save(root, step)
    save(root, 2, is_best=True)
    if is_old:
        (root / BEST_FILE).unlink()
    return root


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("copy", COPIES)
def test_the_best_of_a_copied_run_is_found_and_gives_way_to_a_better_one(
    tmp_path: Path, copy: Callable[[Path, Path], object], is_old: bool
) -> None:
    make_run(tmp_path / "run", is_old=is_old)
    copied = tmp_path / "copied"
    copy(tmp_path / "run", copied)
    assert_is_of_step(read_checkpoint(find_checkpoint(copied, BEST)), 2)

    root = copied / "checkpoints"
    remove_unfinished(root)
    mend_best(root)
    assert_is_of_step(read_checkpoint(find_checkpoint(copied, BEST)), 2)
    for step in (4, 5, 6):  # the run goes on, and gets better and better
        save(root, step)
        save(root, step, is_best=True)
        tidy(root, 2)
        assert_is_of_step(read_checkpoint(find_checkpoint(copied, BEST)), step)
    assert list_steps(root) == [5, 6]
    best = f"best-{step_name(6)}"
    assert {path.name for path in root.iterdir()} == {step_name(5), step_name(6), best, BEST, BEST_FILE}
    assert os.readlink(root / BEST) == best


def test_a_copy_in_which_an_older_ringtrain_went_on_has_the_newest_as_its_best(tmp_path: Path) -> None:
    """It wrote ``best-step-N`` without end beside the directory ``best``, which it could not replace."""
    make_run(tmp_path / "run", is_old=True)
    copy_links_followed(tmp_path / "run", tmp_path / "copied")
    root = tmp_path / "copied/checkpoints"
    for step in (4, 5):
        shutil.copytree(save(root, step), root / f"best-{step_name(step)}")
    assert_is_of_step(read_checkpoint(find_checkpoint(tmp_path / "copied", BEST)), 5)
    mend_best(root)
    tidy(root, 9)
    assert sorted(path.name for path in root.glob("best*")) == [BEST, f"best-{step_name(5)}", BEST_FILE]
    assert os.readlink(root / BEST) == f"best-{step_name(5)}"


def test_a_best_that_is_there_only_as_a_directory_gets_its_name_back(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", is_old=True)
    (root / BEST).unlink()
    (root / f"best-{step_name(2)}").rename(root / BEST)
    assert_is_of_step(read_checkpoint(find_checkpoint(tmp_path / "run", BEST)), 2)
    mend_best(root)
    assert find_best(root) == root / f"best-{step_name(2)}"
    assert_is_of_step(read_checkpoint(root / BEST), 2)
    tidy(root, 9)
    assert_is_of_step(read_checkpoint(root / BEST), 2)


def test_what_the_user_keeps_under_that_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / BEST).mkdir()
    (tmp_path / BEST / "notes.txt").write_text("mine")
    save(tmp_path, 2, is_best=True)
    tidy(tmp_path, 1)
    assert (tmp_path / BEST / "notes.txt").read_text() == "mine"
    assert find_best(tmp_path) == tmp_path / f"best-{step_name(2)}"


def test_a_file_system_without_links_keeps_the_best_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    for step in (1, 2):
        save(tmp_path, step, is_best=True)
        tidy(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {f"best-{step_name(2)}", BEST_FILE}
    assert find_best(tmp_path) == tmp_path / f"best-{step_name(2)}"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"checkpoint": 3}', '{"checkpoint": "../../../etc"}', '{"checkpoint": "step-000000001"}',
     '{"checkpoint": "best-step-000000009"}', "[" * 100_000, "x" * 10_000_000],
)  # fmt: skip
def test_a_damaged_file_means_what_the_link_means(tmp_path: Path, text: str) -> None:
    root = make_run(tmp_path / "run", is_old=False)
    (root / BEST_FILE).write_text(text)
    assert find_best(root) == root / f"best-{step_name(2)}"
    mend_best(root)
    (root / BEST).unlink()
    assert find_best(root) == root / f"best-{step_name(2)}"


def test_mending_what_is_whole_changes_nothing(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", is_old=False)
    before = read_tree(root), (root / BEST_FILE).stat().st_ino, (root / BEST).lstat().st_ino
    mend_best(root)
    assert before == (read_tree(root), (root / BEST_FILE).stat().st_ino, (root / BEST).lstat().st_ino)
    mend_best(tmp_path / "absent")
    mend_best(tmp_path)


@pytest.mark.parametrize("name", [step_name(1), f"best-{step_name(1)}"])
def test_of_a_checkpoint_that_is_a_link_to_an_archive_the_link_is_removed(tmp_path: Path, name: str) -> None:
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


def test_a_step_saved_again_replaces_a_link_to_an_archive_and_not_the_archive(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save(root, 1).rename(tmp_path / "archive")
    (root / step_name(1)).symlink_to(tmp_path / "archive")
    before = read_tree(tmp_path / "archive")
    save(root, 1)
    assert not (root / step_name(1)).is_symlink()
    assert read_tree(tmp_path / "archive") == before
    assert list(root.glob(".*")) == []


# --- As a run writes them ---


def test_a_run_directory_that_is_moved_away_while_it_trains_is_not_made_again(tmp_path: Path) -> None:
    """It would be half a run, which the next start refuses."""
    from ringtrain.training.saving import CheckpointWriter  # here: it loads TensorFlow

    run, moved = tmp_path / "run", tmp_path / "moved"
    lease = acquire_lease(run, environ={})
    directory = RunDirectory(run, may_write=lease.check, on_close=lease.close)
    writer = CheckpointWriter(directory, keep=2, print_line=print, last_step=0)
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
    from ringtrain.training.saving import CheckpointWriter  # here: it loads TensorFlow

    said: list[str] = []
    directory = RunDirectory(run)
    writer = CheckpointWriter(directory, keep=keep, print_line=said.append, last_step=steps[0] - 1)
    for step in steps:
        writer.save(make_checkpoint(step), as_step=True, as_best=True)
    writer.finish(make_checkpoint(steps[-1]))
    directory.close()
    return said


def test_a_copied_run_that_goes_on_keeps_its_number_of_checkpoints_and_warns_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert write_bests(tmp_path / "run", range(1, 5), keep=2) == []
    (tmp_path / "run/checkpoints" / BEST_FILE).unlink()  # as an older ringtrain left it
    copy_links_followed(tmp_path / "run", tmp_path / "copied")
    assert write_bests(tmp_path / "copied", range(5, 9), keep=2) == []
    best = f"best-{step_name(8)}"
    names = {path.name for path in (tmp_path / "copied/checkpoints").iterdir()}
    assert names == {step_name(7), step_name(8), best, BEST, BEST_FILE}
    events = [json.loads(line) for line in (tmp_path / "copied/metrics.jsonl").read_text().splitlines()]
    assert {event["event"] for event in events} == {"checkpoint"}


def test_what_cannot_be_removed_or_kept_as_best_is_told_as_that(
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

    with monkeypatch.context() as patched:
        patched.setattr(store, "_point_best_to", lambda root, name: refuse(root / name))
        [first, *_] = write_bests(tmp_path / "run", range(3, 5), keep=1)
    assert f"the best checkpoint of step 3 cannot be written below {root!r}: Permission denied." in first
    assert "The best one before it stands." in first

    with monkeypatch.context() as patched:
        patched.setattr(store, "_point_best_to", lambda root, name: refuse(root / name))
        (tmp_path / "none").mkdir()
        [first, *_] = write_bests(tmp_path / "none", range(1, 2), keep=1)
    assert first.endswith("There was no best one before it.")
    events = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [event["path"] for event in events if event["event"] == "checkpoint" and event["step"] == 3] == [
        f"checkpoints/{step_name(3)}"
    ]
