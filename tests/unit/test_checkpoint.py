"""Checkpoints: what is written is read back, and which ones are kept."""

import ast
import inspect
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ringtrain.errors import DataError
from ringtrain.run import checkpoint as checkpoint_module
from ringtrain.run.checkpoint import VARIABLES_FILE, Checkpoint, DamagedError, read_checkpoint
from ringtrain.run.store import find_newest, list_steps, remove_unfinished, set_aside, step_name, tidy, write_checkpoint
from ringtrain.run.variables import describe_difference
from ringtrain.runtime import activity
from tests.unit.checkpoints import FILES, RNG, assert_is_of_step, make_checkpoint, read_tree, save, shorten_by_one

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


def test_values_read_are_writable_and_share_no_memory(tmp_path: Path) -> None:
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


def test_each_variable_written_and_chunk_read_counts_as_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[None] = []
    monkeypatch.setattr(activity, "move", lambda: moves.append(None))
    path = save(tmp_path, 1)
    assert len(moves) == 2
    monkeypatch.setattr(checkpoint_module, "HASHED_CHUNK_BYTES", 40)
    read_checkpoint(path)  # of 7 * 4 and 14 * 8 bytes
    assert len(moves) == 2 + 4


def test_reading_uses_nothing_that_executes_code() -> None:
    tree = ast.parse(inspect.getsource(checkpoint_module))
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    } | {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
    named = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert imported.isdisjoint({"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
    assert (called | named).isdisjoint({"load", "eval", "exec", "fromfile"})


# --- Which one a run resumes from ---


def test_a_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert find_newest(tmp_path / "absent") == (None, [])
    assert find_newest(tmp_path) == (None, [])


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    for step in (2, 10, 1_000_000_000, 0):
        save(tmp_path, step)
    assert list_steps(tmp_path) == [0, 2, 10, 1_000_000_000]


def test_other_names_are_not_listed_as_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 7, is_best=True)
    for name in ("step-7", "step-x", "step-000000003.damaged-1", ".writing-step-000000004", "step-000000005 (copy)"):
        (tmp_path / name).mkdir()
    assert list_steps(tmp_path) == []
    assert find_newest(tmp_path) == (None, [])


def test_if_all_are_damaged_each_is_named_and_nothing_changes(tmp_path: Path) -> None:
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


def test_a_checkpoint_set_aside_keeps_bytes_and_frees_its_name(tmp_path: Path) -> None:
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


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step)
        if step in (2, 3):
            save(tmp_path, step, is_best=True)
        tidy(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {step_name(5), step_name(6), "best-step-000000003"}


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
    assert [path.name for path in tmp_path.iterdir()] == ["best-step-000000003"]
    assert read_checkpoint(tmp_path / "best-step-000000003").variables["weights/w"].size == 50


def test_a_step_saved_again_replaces_the_former(tmp_path: Path) -> None:
    save(tmp_path, 3)
    write_checkpoint(tmp_path, make_checkpoint(3, 50), is_best=False)
    assert read_checkpoint(tmp_path / step_name(3)).variables["weights/w"].size == 50
    assert [path.name for path in tmp_path.iterdir()] == [step_name(3)]


def test_an_interrupted_write_is_removed_or_rolled_back(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    save(tmp_path, 2, is_best=True)
    shutil.copytree(tmp_path / step_name(1), tmp_path / f".removing-{step_name(0)}")
    shutil.copytree(tmp_path / step_name(1), tmp_path / f".replaced-{step_name(1)}")
    (tmp_path / step_name(2)).rename(tmp_path / f".replaced-{step_name(2)}")
    (tmp_path / f".writing-{step_name(2)}").mkdir()
    remove_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {step_name(1), step_name(2), "best-step-000000002"}
    for path in tmp_path.glob("*step*"):
        assert_is_of_step(read_checkpoint(path), 1 if path.name == step_name(1) else 2)


def test_cleaning_an_absent_or_empty_directory_does_nothing(tmp_path: Path) -> None:
    remove_unfinished(tmp_path / "absent")
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


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
def test_a_difference_of_names_is_described_in_short(expected: list[str], found: list[str], text: str) -> None:
    assert describe_difference(expected, found) == text
