"""Nothing in a run directory is followed: what its links name is neither written, removed, moved nor read."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

from ringtrain.cli import main
from ringtrain.config import Config
from ringtrain.errors import DataError, RingtrainError, UsageError
from ringtrain.files.atomic import replace_text, replacing
from ringtrain.files.bounded import make_directory
from ringtrain.report import write_report
from ringtrain.report.event_files import list_event_files, read_images
from ringtrain.run import lease
from ringtrain.run.checkpoint import MANIFEST_FILE, digest_of, read_checkpoint
from ringtrain.run.directory import REPORT_FILE, append_event
from ringtrain.run.resume import open_run
from ringtrain.run.store import step_name
from ringtrain.training.session import EventFiles, forget_after
from tests.faults.test_fuzz import make_run
from tests.unit.checkpoints import read_tree

FILES = ["metrics.jsonl", "config.yaml", "run.json", REPORT_FILE, ".lease/000001"]
DIRECTORIES = [".lease", "checkpoints", "tensorboard", "profile", "nonfinite"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that names a holder on another host is waited for."""
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 0.05)


def go_on(run: Path) -> str:
    """Open the run, write into it and report it; the refusal, where there is one."""
    config = Config(out=run, epochs=2, batch_size=16, profile="1:2")
    try:
        opened = open_run(config)
    except RingtrainError as error:
        return str(error)
    try:
        opened.directory.write_event("train", step=16)
        write_report([run], run / REPORT_FILE)
    except (RingtrainError, OSError) as error:
        return str(error)
    finally:
        opened.directory.close()
    return ""


def replace_by_link(path: Path, elsewhere: Path) -> None:
    """Move a file or directory elsewhere, or make it there, and leave a link."""
    if path.exists():
        shutil.move(path, elsewhere)
    elif path.suffix:
        elsewhere.write_text("{}")
    else:
        elsewhere.mkdir()
        (elsewhere / "000007").write_text("precious")
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("name", FILES)
def test_linked_files_are_neither_read_nor_written_nor_replaced(name: str, run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    replace_by_link(run / name, elsewhere)
    before = elsewhere.read_bytes()
    refusal = go_on(run)
    assert elsewhere.read_bytes() == before
    assert (run / name).is_symlink() or name.startswith(".lease")  # a lease of nobody's is removed
    assert Path(name).name in refusal or name.startswith((".lease", "checkpoints"))


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_linked_directory_is_refused_and_keeps_its_content(name: str, run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    replace_by_link(run / name, elsewhere)
    (elsewhere / ".writing-step-000000020").mkdir()
    before = read_tree(elsewhere)
    refusal = go_on(run)
    assert read_tree(elsewhere) == before
    assert "link" in refusal
    assert name in refusal


@pytest.mark.parametrize("command", ["eval", "export"])
def test_a_command_that_looks_into_a_run_follows_no_link(
    command: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_by_link(run / "config.yaml", tmp_path / "elsewhere")
    assert main([command, str(run)]) == 2
    assert "'config.yaml' is a link, which is not followed" in capsys.readouterr().err


def test_an_export_follows_no_link(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace_by_link(run / "export", tmp_path / "elsewhere")
    before = read_tree(tmp_path / "elsewhere")
    assert main(["export", str(run), "--checkpoint", step_name(15), "--workload", "digits"]) == 2
    assert "'export' is a link, which is not followed" in capsys.readouterr().err
    assert read_tree(tmp_path / "elsewhere") == before


def test_temporary_files_have_unpredictable_names(tmp_path: Path) -> None:
    names = set()
    for _ in range(2):
        with replacing(tmp_path / "file") as file:
            names.add(file.name)
    assert len(names) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("gone")])
def test_only_regular_files_are_replaced(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match="'file' is no regular file"):
        replace_text(tmp_path / "file", "x")
    assert len(list(tmp_path.iterdir())) == 1
    assert not (tmp_path / "file").is_file()


def test_the_end_of_a_run_is_not_appended_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    (tmp_path / "metrics.jsonl").symlink_to("precious")
    with pytest.raises(OSError, match="link"):
        append_event(tmp_path, "end")
    assert (tmp_path / "precious").read_text() == "x"


# --- TensorBoard's files ---


def write_events(directory: Path, steps: range) -> None:
    with tf.summary.create_file_writer(str(directory)).as_default() as writer:
        for step in steps:
            tf.summary.scalar("train/loss", 1.0, step=step)
    writer.close()


def steps_of(directory: Path) -> list[int]:
    paths = [str(path) for path in sorted(directory.glob("*tfevents*")) if path.is_file() and not path.is_symlink()]
    events = [tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(paths)]
    return [event.step for event in events if event.step]


def make_sparse(path: Path, record: bytes = b"") -> None:
    path.write_bytes(record)
    os.truncate(path, 2**40)


LONG_RECORD = (2**39).to_bytes(8, "little") + bytes(4) + b"\x89PNG\r\n\x1a\n"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", f"checkpoints/{step_name(15)}/manifest.json"])
def test_a_sparse_file_is_refused_or_passed_over(name: str, run: Path) -> None:
    before = (run / name).read_bytes()
    os.truncate(run / name, 2**40)
    refusal = go_on(run)
    assert ("more than" in refusal and name in refusal) == (not name.startswith("checkpoints"))
    if refusal:
        with (run / name).open("rb") as file:
            assert file.read(len(before)) == before
        with pytest.raises(UsageError, match=f"{name}' cannot be read: .* more than"):
            write_report([run], run / REPORT_FILE)


@pytest.mark.timeout(60)
def test_variables_that_no_memory_holds_are_refused(run: Path) -> None:
    """Memory that is only promised would be taken while they are read, and the process killed."""
    path = run / "checkpoints" / step_name(15)
    content = json.loads((path / MANIFEST_FILE).read_text())["content"]
    content["files"]["variables.bin"]["bytes"] = 2**43
    content["variables"] = [{"name": "weights/w", "dtype": "int8", "shape": [2**43], "offset": 0, "bytes": 2**43}]
    (path / MANIFEST_FILE).write_text(json.dumps({"sha256": digest_of(content), "content": content}))
    os.truncate(path / "variables.bin", 2**43)
    with pytest.raises(DataError, match="for which this process gets no memory"):
        read_checkpoint(path)


@pytest.mark.timeout(60)
def test_event_files_without_end_are_passed_over(tmp_path: Path) -> None:
    directory = tmp_path / "tensorboard"
    write_events(directory, range(1, 7))
    sparse = [directory / "e.tfevents.sparse", directory / "f.tfevents.long"]
    make_sparse(sparse[0])
    make_sparse(sparse[1], LONG_RECORD)
    (directory / ".writing-events").symlink_to(tmp_path / "made")  # the name that it had once
    assert read_images(sorted(directory.glob("*tfevents*"))) == {}
    EventFiles(directory, first_step=4).close()
    assert not (tmp_path / "made").exists()
    for path in sparse:
        assert path.stat().st_size == 2**40
        path.unlink()
    assert steps_of(directory) == [1, 2, 3, 4]


ODD_KINDS: dict[str, Callable[[Path], None]] = {
    "link": lambda path: path.symlink_to(path.parents[1] / "elsewhere"),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
}


@pytest.mark.timeout(60)
def test_an_incomplete_event_file_is_removed_and_never_read(tmp_path: Path) -> None:
    unfinished = tmp_path / ".writing-0123-events.out.tfevents.1.vm"
    unfinished.write_bytes(b"cut off")
    assert list_event_files(tmp_path) == []
    forget_after(tmp_path, 3)
    assert not unfinished.exists()


@pytest.mark.parametrize("kind", ODD_KINDS)
def test_odd_event_files_are_refused_by_name(kind: str, run: Path, tmp_path: Path) -> None:
    write_events(tmp_path / "made", range(1, 7))
    [made] = (tmp_path / "made").iterdir()
    elsewhere = made.rename(tmp_path / "elsewhere")
    before = elsewhere.read_bytes()
    (run / "tensorboard").mkdir()
    ODD_KINDS[kind](run / "tensorboard" / "events.out.tfevents.x")
    with pytest.raises(UsageError, match=r"'events\.out\.tfevents\.x' is no regular file"):
        open_run(Config(out=run, epochs=2, batch_size=16))
    with pytest.raises(RingtrainError, match=r"'events\.out\.tfevents\.x' is (no regular file|a link)"):
        EventFiles(run / "tensorboard", first_step=4)
    with pytest.raises(UsageError, match=r"tfevents\.x' cannot be read: .* is (no regular file|a link)"):
        write_report([run], run / REPORT_FILE)
    assert elsewhere.read_bytes() == before


def test_a_batch_that_is_kept_and_a_profile_go_through_no_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run / "nonfinite").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a link, which is not followed"):
        make_directory(run / "nonfinite")
    make_directory(run / "profile")
    make_directory(run / "profile")
    assert (run / "profile").is_dir()
    with pytest.raises(FileNotFoundError):
        make_directory(tmp_path / "gone" / "checkpoints")


def test_a_run_behind_a_link_resumes(run: Path, tmp_path: Path) -> None:
    """What the user names may be a link: the run as a whole on another disk."""
    (tmp_path / "here").symlink_to(run)
    assert go_on(tmp_path / "here") == ""
