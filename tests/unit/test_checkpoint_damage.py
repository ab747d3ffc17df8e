"""Checkpoints: damage of every kind is found, and its file named."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringtrain.errors import DataError
from ringtrain.run.checkpoint import FORMAT, MANIFEST_FILE, VARIABLES_FILE, DamagedError, read_checkpoint
from ringtrain.run.store import find_newest, step_name
from tests.unit.checkpoints import FILES, assert_is_of_step, save, shorten_by_one


def truncate_to(fraction: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(path.stat().st_size * fraction))


def append_a_byte(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def overwrite_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def replace_by_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_a_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "one byte is missing": shorten_by_one,
    "nine tenths are there": truncate_to(0.9),
    "half is there": truncate_to(0.5),
    "a tenth is there": truncate_to(0.1),
    "emptied": truncate_to(0),
    "a byte too many": append_a_byte,
    "zeros": overwrite_with_zeros,
    "removed": Path.unlink,
    "a directory": replace_by_a_directory,
    "a dangling link": replace_by_a_dangling_link,
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_the_checkpoint_before_is_used(tmp_path: Path, damage: str, file: str) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    DAMAGES[damage](tmp_path / step_name(3) / file)
    with pytest.raises(DamagedError, match=f"step-000000003/{file}") as raised:
        read_checkpoint(tmp_path / step_name(3))
    assert raised.value.exit_code == 3
    newest, damages = find_newest(tmp_path)
    assert newest is not None
    assert_is_of_step(newest, 2)
    assert len(damages) == 1
    assert f"step-000000003/{file}" in damages[0]


@pytest.mark.parametrize("replacement", ["nothing", "file", "empty directory", "dangling link"])
def test_a_checkpoint_that_is_no_directory_of_files_is_damaged(tmp_path: Path, replacement: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    shutil.rmtree(path)
    if replacement == "file":
        path.write_text("x")
    elif replacement == "empty directory":
        path.mkdir()
    elif replacement == "dangling link":
        path.symlink_to("nowhere")
    with pytest.raises(DamagedError, match=step_name(2)):
        read_checkpoint(path)
    newest, damages = find_newest(tmp_path)
    assert newest is not None
    assert newest.step == 1
    assert len(damages) == (replacement != "nothing")


def test_no_flipped_bit_in_a_manifest_yields_other_content(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    original = (path / MANIFEST_FILE).read_bytes()
    outcomes: set[str] = set()
    for position in range(len(original)):
        for bit in range(position % 4, 8, 4):
            changed = bytearray(original)
            changed[position] ^= 1 << bit
            (path / MANIFEST_FILE).write_bytes(changed)
            outcomes.add(outcome_of_reading(path, expected_step=5))
    # A larger format number is the one change of a manifest whose message may be another.
    assert outcomes <= {"damaged", "newer", "unchanged"}
    assert "damaged" in outcomes


def outcome_of_reading(path: Path, expected_step: int) -> str:
    try:
        read = read_checkpoint(path)
    except DamagedError:
        return "damaged"
    except DataError as error:
        return "newer" if "Update ringtrain." in str(error) else f"not documented: {error}"
    assert_is_of_step(read, expected_step)
    return "unchanged"


def test_every_flipped_bit_of_the_variables_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    original = (path / VARIABLES_FILE).read_bytes()
    for position in range(len(original)):
        changed = bytearray(original)
        changed[position] ^= 1 << position % 8
        (path / VARIABLES_FILE).write_bytes(changed)
        with pytest.raises(DamagedError, match=f"{VARIABLES_FILE}.*bytes have changed"):
            read_checkpoint(path)


@pytest.mark.parametrize(
    "text",
    [
        "null", "[]", "[1, 2]", "3", '"text"', "true", "{}", '{"content": {}}', '{"content": null, "sha256": ""}',
        '{"content": [], "sha256": ""}', '{"content": {"format": 2}, "sha256": ""}',
        '{"content": {"format": "1"}, "sha256": 1}', '{"content": {"format": null}, "sha256": null}', "\ufeff{}",
    ],
)  # fmt: skip
def test_json_of_another_shape_is_no_manifest(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, 5)
    (path / MANIFEST_FILE).write_text(text)
    with pytest.raises(DamagedError, match=MANIFEST_FILE):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(step="5"),
        lambda content: content.update(step=6),
        lambda content: content.update(format="1"),
        lambda content: content.update(more=1),
        lambda content: content.pop("run"),
        lambda content: content["files"][VARIABLES_FILE].update(bytes="140"),
        lambda content: content["variables"].pop(),
        lambda content: content["variables"].reverse(),
        lambda content: content["variables"][0].update(dtype="int32"),
        lambda content: content["progress"].update(best=0),
    ],
)
def test_a_manifest_that_was_edited_is_damaged(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = save(tmp_path, 5)
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    change(manifest["content"])
    (path / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(DamagedError, match="does not have the checksum that it states"):
        read_checkpoint(path)


def test_files_of_two_checkpoints_do_not_make_one(tmp_path: Path) -> None:
    shutil.copy(save(tmp_path, 1) / VARIABLES_FILE, save(tmp_path, 2) / VARIABLES_FILE)
    with pytest.raises(DamagedError, match=VARIABLES_FILE):
        read_checkpoint(tmp_path / step_name(2))


@pytest.mark.parametrize("number", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_no_damage_and_names_the_way_on(tmp_path: Path, number: int) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 5)
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    manifest["content"] = {"format": number, "tensors": "elsewhere"}
    (path / MANIFEST_FILE).write_text(json.dumps(manifest))
    for read in (lambda: read_checkpoint(path), lambda: find_newest(tmp_path)):
        with pytest.raises(DataError, match=rf"format {number}, .*the version that wrote it, or update") as raised:
            read()
        assert not isinstance(raised.value, DamagedError)


@pytest.mark.parametrize("name", FILES)
def test_an_unreadable_file_does_not_count_as_damage(name: str) -> None:
    with tempfile.TemporaryDirectory() as directory:  # one that other users may enter
        root = Path(directory) / "checkpoints"
        for step in (1, 2):
            save(root, step)
        for path in (root.parent, root, *root.iterdir()):
            path.chmod(0o755)
        (root / step_name(2) / name).chmod(0)
        with as_nobody(), pytest.raises(DataError, match=f"{name}' cannot be read: Permission denied. Mend") as caught:
            find_newest(root)
    assert not isinstance(caught.value, DamagedError)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
