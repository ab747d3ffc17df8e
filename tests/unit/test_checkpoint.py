"""Checkpoints: complete or not there, verified when read, and nothing good is ever lost."""

from __future__ import annotations

import ast
import errno
import inspect
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ringtrain import checkpoint as checkpoint_module
from ringtrain.checkpoint import (
    BEST,
    FORMAT,
    MANIFEST_FILE,
    VARIABLES_FILE,
    Checkpoint,
    DamagedError,
    describe_difference,
    find_newest,
    list_steps,
    read_checkpoint,
    remove_unfinished,
    set_aside,
    step_name,
    tidy,
    write_checkpoint,
)
from ringtrain.errors import DataError

FILES = (MANIFEST_FILE, VARIABLES_FILE)
RNG = np.random.default_rng(0)


def make_checkpoint(step: int, size: int = 7) -> Checkpoint:
    """Every value tells the step, so that a mixture of two checkpoints is seen."""
    return Checkpoint(
        step=step,
        variables={"weights/w": np.full((size,), step, np.float32), "slots/m": np.full((2, size), -step, np.int64)},
        progress={"best": step / 3, "finished": None},
        run={"workload": "digits", "config": {"epochs": 2, "optimizer": {"lr": 0.1}}},
    )


def save(root: Path, step: int, *, is_best: bool = False) -> Path:
    return write_checkpoint(root, make_checkpoint(step), is_best=is_best)


def assert_is_of_step(read: Checkpoint, step: int) -> None:
    expected = make_checkpoint(step, read.variables["weights/w"].size)
    assert (read.step, read.progress, read.run) == (step, expected.progress, expected.run)
    assert list(read.variables) == list(expected.variables)
    for name, value in expected.variables.items():
        np.testing.assert_array_equal(read.variables[name], value, strict=True)


def read_tree(root: Path) -> dict[str, str]:
    """Everything below a directory: paths to contents or the targets of links."""
    tree = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            tree[name] = f"-> {os.readlink(path)}"
        else:
            tree[name] = "directory" if path.is_dir() else path.read_bytes().hex()
    return tree


# --- What is written is what is read ---

NUMPY_VALUES = {
    "float32": RNG.standard_normal((3, 4)).astype(np.float32),
    "float64": np.array([np.nan, -np.nan, np.inf, -0.0, 5e-324, 1 / 3]),
    "float16": np.array([1.5, np.inf, 6e-8], np.float16),
    "int32": np.array([-(2**31), 2**31 - 1], np.int32),
    "int64": np.array([[-(2**63), 2**63 - 1]]),
    "uint8": np.arange(256, dtype=np.uint8),
    "bool": np.array([True, False, True]),
    "bfloat16": RNG.standard_normal((2, 3)).astype(ml_dtypes.bfloat16),
    "float32 scalar": np.array(1.1, np.float32),
    "bool scalar": np.array(True),
    "bfloat16 scalar": np.array(1.1, ml_dtypes.bfloat16),
    "NumPy scalar": np.float64(0.1),
    "empty": np.zeros((0,), np.float32),
    "empty of rank 3": np.zeros((2, 0, 3), np.int64),
    "empty bfloat16": np.zeros((0, 2), ml_dtypes.bfloat16),
    "transposed": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "every other": np.arange(10)[::2],
    "backwards": np.arange(10, dtype=np.float64)[::-1],
    "broadcast": np.broadcast_to(np.float32(2.5), (2, 2)),
}


@pytest.mark.parametrize("name", NUMPY_VALUES)
def test_a_value_comes_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    # The byte before it makes its place in the file an odd one.
    variables = {"odd": np.array([True]), "ä/weights:0": np.asarray(NUMPY_VALUES[name])}
    path = write_checkpoint(tmp_path, Checkpoint(step=1, variables=variables, progress={}, run={}), is_best=False)
    read = read_checkpoint(path).variables
    assert list(read) == list(variables)
    for key, value in variables.items():
        assert (read[key].dtype, read[key].shape) == (value.dtype, value.shape)
        assert read[key].tobytes() == value.tobytes()


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", ">i8"])
def test_a_big_endian_value_comes_back_as_the_same_numbers(tmp_path: Path, dtype: str) -> None:
    value = np.array([[1, -2], [3, 65537]]).astype(dtype)
    path = write_checkpoint(tmp_path, Checkpoint(step=1, variables={"a": value}, progress={}, run={}), is_best=False)
    read = read_checkpoint(path).variables["a"]
    assert read.dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(read, value)


def test_values_can_be_changed_after_they_were_read_and_do_not_share_memory(tmp_path: Path) -> None:
    read = read_checkpoint(save(tmp_path, 3)).variables
    read["weights/w"][:] = 9
    np.testing.assert_array_equal(read["slots/m"], make_checkpoint(3).variables["slots/m"])


def test_progress_and_facts_come_back(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"a": [1, 0.1, None, True, "ä\n"], "nested": {"z": 1, "b": {}}, "large": 2**80}
    numbers = {"inf": float("inf"), "tiny": 5e-324}
    path = write_checkpoint(tmp_path, Checkpoint(step=0, variables={}, progress=numbers, run=facts), is_best=False)
    read = read_checkpoint(path)
    assert (read.step, dict(read.variables), read.progress, read.run) == (0, {}, numbers, facts)


def test_a_large_variable_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "HASHED_CHUNK_BYTES", 1000)
    path = write_checkpoint(tmp_path, make_checkpoint(5, 333), is_best=False)
    assert_is_of_step(read_checkpoint(path), 5)


def test_nothing_that_runs_code_is_used_to_read() -> None:
    tree = ast.parse(inspect.getsource(checkpoint_module))
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    } | {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
    named = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert imported.isdisjoint({"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
    assert (called | named).isdisjoint({"load", "eval", "exec", "fromfile"})


# --- Damage of every kind is found ---


def truncate_to(fraction: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(path.stat().st_size * fraction))


def shorten_by_one(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


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
def test_damage_is_found_and_its_file_named(tmp_path: Path, damage: str, file: str) -> None:
    path = save(tmp_path, 5)
    DAMAGES[damage](path / file)
    with pytest.raises(DamagedError, match=f"step-000000005/{file}") as raised:
        read_checkpoint(path)
    assert raised.value.exit_code == 3


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_newest_whole_one(tmp_path: Path, damage: str, file: str) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    DAMAGES[damage](tmp_path / step_name(3) / file)
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


def test_no_flipped_bit_of_the_manifest_is_taken_for_other_content(tmp_path: Path) -> None:
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
        '{"content": [], "sha256": ""}', '{"content": {"format": 1}, "sha256": ""}',
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
        lambda content: content.update(format=0),
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


def test_a_newer_format_is_no_damage_and_says_update(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 5)
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    manifest["content"] = {"format": FORMAT + 1, "tensors": "elsewhere"}
    (path / MANIFEST_FILE).write_text(json.dumps(manifest))
    for read in (lambda: read_checkpoint(path), lambda: find_newest(tmp_path)):
        with pytest.raises(DataError, match=rf"format {FORMAT + 1}, written by a newer.*Update ringtrain") as raised:
            read()
        assert not isinstance(raised.value, DamagedError)


# --- Which one a run goes on from ---


def test_a_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert find_newest(tmp_path / "absent") == (None, [])
    assert find_newest(tmp_path) == (None, [])


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    for step in (2, 10, 1_000_000_000, 0):
        save(tmp_path, step)
    assert list_steps(tmp_path) == [0, 2, 10, 1_000_000_000]


def test_what_is_no_checkpoint_s_name_is_not_listed(tmp_path: Path) -> None:
    save(tmp_path, 7, is_best=True)
    for name in ("step-7", "step-x", "step-000000003.damaged-1", ".writing-step-000000004", "step-000000005 (copy)"):
        (tmp_path / name).mkdir()
    assert list_steps(tmp_path) == []
    assert find_newest(tmp_path) == (None, [])


def test_where_none_is_whole_each_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        shorten_by_one(save(tmp_path, step) / FILES[step % 2])
    before = read_tree(tmp_path)
    with pytest.raises(DataError, match="holds 3 checkpoints, and none is whole") as raised:
        find_newest(tmp_path)
    assert raised.value.exit_code == 3
    assert not isinstance(raised.value, DamagedError)
    assert all(step_name(step) in str(raised.value) for step in (1, 2, 3))
    assert "--resume never" in str(raised.value)
    assert read_tree(tmp_path) == before


def test_a_damaged_checkpoint_set_aside_keeps_its_bytes_and_frees_its_name(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    for attempt in (1, 2):
        shorten_by_one(tmp_path / step_name(3) / VARIABLES_FILE)
        before = read_tree(tmp_path / step_name(3))
        (moved,) = set_aside(tmp_path, newer_than=2)
        assert moved.name == f"step-000000003.damaged-{attempt}"
        assert read_tree(moved) == before
        assert list_steps(tmp_path) == [1, 2]
        save(tmp_path, 3)
    assert set_aside(tmp_path, newer_than=3) == []
    tidy(tmp_path, 1)
    remove_unfinished(tmp_path)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"step-000000003", "step-000000003.damaged-1", "step-000000003.damaged-2"}


# --- What is kept ---


def test_the_newest_are_kept_and_the_best_besides(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step)
        if step in (2, 3):
            save(tmp_path, step, is_best=True)
        tidy(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {step_name(5), step_name(6), "best-step-000000003", BEST}
    assert_is_of_step(read_checkpoint(tmp_path / BEST), 3)


@pytest.mark.parametrize("keep", [1, 3, 10])
def test_as_many_as_wanted_are_kept(tmp_path: Path, keep: int) -> None:
    for step in range(5):
        save(tmp_path, step)
    tidy(tmp_path, keep)
    assert list_steps(tmp_path) == list(range(5))[-keep:]


def test_the_best_one_of_a_step_that_is_saved_again_is_the_later(tmp_path: Path) -> None:
    save(tmp_path, 3, is_best=True)
    write_checkpoint(tmp_path, make_checkpoint(3, 50), is_best=True)
    remove_unfinished(tmp_path)
    tidy(tmp_path, 1)
    assert read_checkpoint(tmp_path / BEST).variables["weights/w"].size == 50
    assert {path.name for path in tmp_path.iterdir()} == {"best-step-000000003", BEST}


def test_there_is_a_best_one_at_any_moment(tmp_path: Path) -> None:
    save(tmp_path, 1, is_best=True)
    writer = threading.Thread(target=lambda: [save(tmp_path, step, is_best=True) for step in range(2, 60)])
    writer.start()
    seen = []
    while writer.is_alive():
        seen.append(os.readlink(tmp_path / BEST))
        assert (tmp_path / seen[-1] / MANIFEST_FILE).is_file()
    writer.join()
    assert seen == sorted(seen)
    assert len(set(seen)) > 1


def test_without_the_link_no_best_one_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 3, is_best=True)
    (tmp_path / BEST).unlink()
    tidy(tmp_path, 1)
    assert_is_of_step(read_checkpoint(tmp_path / "best-step-000000003"), 3)


def test_a_step_saved_again_replaces_the_former(tmp_path: Path) -> None:
    save(tmp_path, 3)
    write_checkpoint(tmp_path, make_checkpoint(3, 50), is_best=False)
    assert read_checkpoint(tmp_path / step_name(3)).variables["weights/w"].size == 50
    assert [path.name for path in tmp_path.iterdir()] == [step_name(3)]


def test_what_a_killed_process_left_is_cleared_up_and_what_it_took_away_is_put_back(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    save(tmp_path, 2, is_best=True)
    shutil.copytree(tmp_path / step_name(1), tmp_path / f".removing-{step_name(0)}")
    shutil.copytree(tmp_path / step_name(1), tmp_path / f".replaced-{step_name(1)}")
    (tmp_path / step_name(2)).rename(tmp_path / f".replaced-{step_name(2)}")
    (tmp_path / f".writing-{step_name(2)}").mkdir()
    (tmp_path / f".writing-{BEST}").symlink_to("best-step-000000002")
    remove_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {step_name(1), step_name(2), "best-step-000000002", BEST}
    for path in tmp_path.iterdir():
        assert_is_of_step(read_checkpoint(path), 1 if path.name == step_name(1) else 2)


def test_clearing_up_where_there_is_nothing_does_nothing(tmp_path: Path) -> None:
    remove_unfinished(tmp_path / "absent")
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- A write that does not come to its end ---


@pytest.mark.parametrize("is_best", [False, True])
def test_a_writer_that_may_not_write_any_more_leaves_all_as_it_was(tmp_path: Path, is_best: bool) -> None:
    for step in (1, 2):
        save(tmp_path, step, is_best=is_best)
    before = read_tree(tmp_path)

    def refuse() -> None:
        raise PermissionError("taken over")

    for step in (2, 3):
        with pytest.raises(PermissionError, match="taken over"):
            write_checkpoint(tmp_path, make_checkpoint(step, 50), is_best=is_best, may_write=refuse)
        assert read_tree(tmp_path) == before


def test_whether_it_may_write_is_asked_when_all_is_written_and_nothing_visible(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    write_checkpoint(
        tmp_path,
        make_checkpoint(1),
        is_best=False,
        may_write=lambda: seen.append(sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))),
    )
    temporary = f".writing-{step_name(1)}"
    assert seen == [[temporary, *(f"{temporary}/{file}" for file in FILES)]]


def test_a_value_that_is_no_json_leaves_nothing_behind(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = read_tree(tmp_path)
    with pytest.raises(TypeError):
        write_checkpoint(tmp_path, Checkpoint(step=2, variables={}, progress={"best": object()}, run={}), is_best=False)
    assert read_tree(tmp_path) == before


FILL_UP = """
import json, os, resource, sys
from pathlib import Path
import numpy as np
from ringtrain.checkpoint import Checkpoint, read_checkpoint, write_checkpoint

root, kind = Path(sys.argv[1]), sys.argv[2]

def save(step, size, is_best=False):
    variables = {"a": np.full((size,), step, np.uint8)}
    return write_checkpoint(root, Checkpoint(step=step, variables=variables, progress={}, run={}), is_best=is_best)

def tree():
    return {str(p.relative_to(root)): p.read_bytes().hex() if p.is_file() else None for p in root.rglob("*")}

save(1, 1000)
save(1, 1000, is_best=True)
if kind == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
before, errors = tree(), []
for step, size, is_best in ((2, 900_000, False), (1, 900_000, False), (2, 5_000_000, True), (1, 5_000_000, True)):
    try:
        save(step, size, is_best)
    except OSError as error:
        errors.append(error.errno)
    if tree() != before:
        sys.exit(f"step {step}: {sorted(tree())} is not {sorted(before)}")
save(2, 100)
print(json.dumps({"errors": errors, "steps": [read_checkpoint(root / f"step-00000000{n}").step for n in (1, 2)]}))
"""
ON_A_SMALL_DISK = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]
MOUNT = 'mount -t tmpfs -o size=600k tmpfs "$1"; shift; exec "$@"'


def kinds_of_full() -> Iterator[str]:
    yield "limit"
    if shutil.which("unshare"):
        tried = subprocess.run([*ON_A_SMALL_DISK, MOUNT, "sh", "/mnt", "true"], capture_output=True)
        if tried.returncode == 0:  # a process may have a file system of its own here
            yield "disk"


@pytest.mark.parametrize("kind", kinds_of_full())
def test_a_full_disk_is_an_error_that_leaves_all_as_it_was(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", FILL_UP, str(tmp_path), kind]
    if kind == "disk":
        command = [*ON_A_SMALL_DISK, MOUNT, "sh", str(tmp_path), *command]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.stderr == ""
    expected = errno.EFBIG if kind == "limit" else errno.ENOSPC
    assert json.loads(finished.stdout) == {"errors": [expected] * 4, "steps": [1, 2]}


# Forks a writer for each line that it reads, so that NumPy is imported once, and says when it is gone.
WRITER = """
import os, sys
from pathlib import Path
import numpy as np
from ringtrain.checkpoint import Checkpoint, find_newest, remove_unfinished, tidy, write_checkpoint

def write_for_ever(root):
    remove_unfinished(root)
    newest, damages = find_newest(root)
    step = newest.step if newest else 0
    while True:
        step += 1
        variables = {"weights/w": np.full((10_000,), step, np.float32), "slots/m": np.full((2, 10_000), -step)}
        run = {"workload": "digits", "config": {"epochs": 2, "optimizer": {"lr": 0.1}}}
        whole = Checkpoint(step=step, variables=variables, progress={"best": step / 3, "finished": None}, run=run)
        for is_best in (False, True, True, False):  # the second time, one of the same name is there
            write_checkpoint(root, whole, is_best=is_best)
            os.write(1, f"{'best' if is_best else 'step'} {step}\\n".encode())
            tidy(root, 2)

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        write_for_ever(Path(sys.argv[1]))
    os.write(1, f"pid {pid}\\n".encode())
    os.write(1, f"gone {os.WTERMSIG(os.waitpid(pid, 0)[1])}\\n".encode())
"""


def test_a_writer_killed_at_any_moment_leaves_whole_checkpoints_and_loses_none_that_it_announced(
    tmp_path: Path,
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    announced = {"step": 0, "best": 0}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        for _ in range(30):
            print(file=nursery.stdin)
            kill_a_writer(iter(nursery.stdout), chance, announced)
            assert_all_is_whole(tmp_path, announced)
        nursery.stdin.close()
    assert nursery.returncode == 0
    assert announced["best"] > 3


def kill_a_writer(lines: Iterator[str], chance: random.Random, announced: dict[str, int]) -> None:
    """Kill a writer some time after it announced some checkpoints, and note all that it announced."""
    wait_for, pid, count = chance.randrange(1, 5), 0, 0
    for line in lines:
        kind, number = line.split()
        if kind == "gone":
            assert int(number) == signal.SIGKILL
            return
        if kind == "pid":
            pid = int(number)
        else:
            count += 1
            announced[kind] = int(number)
        if pid and count >= wait_for:
            time.sleep(chance.uniform(0, 0.015))  # the moment, within the writing of a checkpoint or two
            os.kill(pid, signal.SIGKILL)
            wait_for = sys.maxsize
    pytest.fail("the process that starts writers has ended")


def assert_all_is_whole(root: Path, announced: dict[str, int]) -> None:
    for path in root.iterdir():
        if not path.name.startswith(".") and path.exists():  # `best` may mean one that is just being replaced
            read = read_checkpoint(path)
            assert_is_of_step(read, read.step)
    remove_unfinished(root)
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []
    newest, damages = find_newest(root)
    assert damages == []
    assert newest is not None
    assert_is_of_step(newest, newest.step)
    assert newest.step >= announced["step"]
    if announced["best"]:
        best = read_checkpoint(root / BEST)
        assert_is_of_step(best, best.step)
        assert best.step >= announced["best"]


@pytest.mark.parametrize(
    ("expected", "found", "text"),
    [
        ([], [], ""),
        (["a"], ["a"], ""),
        (["a", "b"], ["b"], "missing: a"),
        (["a"], ["a", "c"], "not in the model: c"),
        (["a"], ["b"], "missing: a; not in the model: b"),
        (list("abcdefg"), [], "missing: a, b, c, d, e and 2 more"),
    ],
)
def test_a_difference_of_names_is_told_in_short(expected: list[str], found: list[str], text: str) -> None:
    assert describe_difference(expected, found) == text
