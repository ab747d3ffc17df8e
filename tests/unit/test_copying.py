"""Copies in a store: complete or absent, and never of another run, or of the run onto itself."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ringtrain.cli import main
from ringtrain.errors import DataError, UsageError
from ringtrain.run.checkpoint import MANIFEST_FILE, VARIABLES_FILE, read_checkpoint
from ringtrain.run.store import step_name
from ringtrain.tracking.base import require_store
from ringtrain.tracking.copying import Copy, refuse_copy
from tests.unit.checkpoints import assert_is_of_step, read_tree, save

ID = "0123456789abcdef"
OTHER_ID = "fedcba9876543210"
BUCKET = "memory://bucket"


def make_run(path: Path, run_id: str = ID) -> Path:
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.yaml").write_text("workload: digits\noptimizer: {lr: 0.1}\n")
    identity = {"id": run_id, "seed": 0, "started": "2026-11-27T00:00:00Z", "host": "n1"}
    (path / "run.json").write_text(json.dumps(identity))
    (path / "metrics.jsonl").write_text(json.dumps({"event": "start", "time": 5.0}) + "\n")
    for step in (10, 20):
        save(path / "checkpoints", step)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs/digits")


@pytest.fixture(autouse=True)
def empty_bucket() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


def stored_names() -> set[str]:
    names = fsspec.filesystem("memory").find("/bucket/digits")
    return {name.removeprefix("/bucket/digits/") for name in names}


def names_of(step: int) -> set[str]:
    return {f"checkpoints/{step_name(step)}/{name}" for name in (MANIFEST_FILE, VARIABLES_FILE)}


def test_a_copy_is_a_run_directory(run: Path, tmp_path: Path) -> None:
    Copy(run, f"file://{tmp_path}/copies").send()
    assert read_tree(tmp_path / "copies/digits") == read_tree(run)


def test_later_sends_copy_what_is_new(run: Path) -> None:
    copy = Copy(run, BUCKET)
    copy.send()
    save(run / "checkpoints", 30)
    copy.send(ends=False)
    assert names_of(10) | names_of(20) | names_of(30) <= stored_names()


# --- An output is never its own input ---


def in_its_parent(run: Path) -> str:
    return f"file://{run.parent}"


def in_its_parent_by_a_link(run: Path) -> str:
    link = run.parent.parent / "link"
    link.symlink_to(run.parent)
    return f"file://{link}"


def in_its_parent_by_dots(run: Path) -> str:
    return f"file://{run}/../../{run.parent.name}"


def inside_it(run: Path) -> str:
    return f"file://{run}"


def below_it(run: Path) -> str:
    return f"local://{run}/checkpoints/x"


ALIASES = [in_its_parent, in_its_parent_by_a_link, in_its_parent_by_dots, inside_it, below_it]


@pytest.mark.parametrize("alias", ALIASES)
def test_a_run_is_never_copied_onto_itself(alias: Callable[[Path], str], run: Path) -> None:
    address = alias(run)
    before = read_tree(run)
    for refuse in (refuse_copy, Copy):
        with pytest.raises(UsageError, match="which is the run directory itself or inside it"):
            refuse(run, address)
    assert main(["track", str(run), "--to", address]) == 2
    assert {name: content for name, content in read_tree(run).items() if not name.startswith(".")} == before


def test_a_store_that_is_the_run_directory_by_another_name_is_refused(run: Path) -> None:
    """As a bucket that is mounted where the run is."""

    class Mounted(fsspec.implementations.local.LocalFileSystem):
        protocol = "mounted"
        root_marker = ""

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            name = path.removeprefix("mounted://").removeprefix(str(run.parent)).lstrip("/")
            return f"{run.parent}/{name}"

    fsspec.register_implementation("mounted", Mounted, clobber=True)
    before = read_tree(run)
    copy = Copy(run, "mounted://")
    with pytest.raises(UsageError, match="which is the run directory itself"):
        copy.send()
    assert read_tree(run) == before


# --- Two runs of one name ---


@pytest.mark.parametrize("store", ["bucket", "directory"])
def test_the_copy_of_another_run_is_not_replaced(store: str, run: Path, tmp_path: Path) -> None:
    address = BUCKET if store == "bucket" else f"file://{tmp_path}/copies"
    other = make_run(tmp_path / "others/digits", OTHER_ID)
    save(other / "checkpoints", 40)
    Copy(run, address).send()
    with pytest.raises(UsageError, match=rf"run {ID[:8]} .*is run {OTHER_ID[:8]} .*Give another address"):
        Copy(other, address).send()
    stored = fsspec.filesystem("memory" if store == "bucket" else "file")
    root = "/bucket" if store == "bucket" else f"{tmp_path}/copies"
    assert json.loads(stored.cat_file(f"{root}/digits/run.json"))["id"] == ID
    assert not stored.exists(f"{root}/digits/checkpoints/{step_name(40)}")


def test_a_new_run_is_refused_before_its_start_where_another_is(run: Path, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/copies"
    Copy(run, address).send()
    refuse_copy(run, address)
    with pytest.raises(UsageError, match="holds the copy of another run"):
        refuse_copy(tmp_path / "new/digits", address)
    refuse_copy(tmp_path / "new/of_another_name", address)


def test_an_identity_that_is_none_is_refused(run: Path) -> None:
    fsspec.filesystem("memory").pipe_file("/bucket/digits/run.json", b"[]")
    with pytest.raises(DataError, match="is no identity of a run"):
        Copy(run, BUCKET).send()


# --- Checkpoints are complete, or absent ---


def remove_variables(checkpoint: Path) -> None:
    (checkpoint / VARIABLES_FILE).unlink()


def change_variables(checkpoint: Path) -> None:
    content = bytearray((checkpoint / VARIABLES_FILE).read_bytes())
    content[3] ^= 1
    (checkpoint / VARIABLES_FILE).write_bytes(content)


def cut_manifest(checkpoint: Path) -> None:
    content = (checkpoint / MANIFEST_FILE).read_bytes()
    (checkpoint / MANIFEST_FILE).write_bytes(content[:-20])


def remove_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST_FILE).unlink()


DAMAGES = [remove_variables, change_variables, cut_manifest, remove_manifest]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_all_else_is_copied(damage: Callable[[Path], None], run: Path) -> None:
    damage(run / "checkpoints" / step_name(10))
    copy = Copy(run, BUCKET)
    for _ in range(2):  # it is not taken for copied
        with pytest.raises(DataError, match=step_name(10)):
            copy.send()
    assert not {name for name in stored_names() if step_name(10) in name}
    assert names_of(20) | {"config.yaml", "run.json", "metrics.jsonl"} <= stored_names()


def test_a_checkpoint_that_is_removed_during_its_copy_leaves_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = run / "checkpoints" / step_name(10)
    monkeypatch.setattr("ringtrain.tracking.copying.CHUNK_BYTES", 8)
    num_chunks = 0

    def remove_in_the_middle() -> None:
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks == 3 and removed.exists():
            shutil.rmtree(removed)

    Copy(run, BUCKET, move=remove_in_the_middle).send()
    assert not {name for name in stored_names() if step_name(10) in name}
    assert names_of(20) <= stored_names()


def test_an_incomplete_checkpoint_in_the_store_is_copied_again(run: Path, tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    Copy(run, BUCKET).send()
    variables = f"/bucket/digits/checkpoints/{step_name(10)}/{VARIABLES_FILE}"
    store.rm_file(variables)
    store.pipe_file(f"/bucket/digits/checkpoints/{step_name(20)}/{MANIFEST_FILE}", b"{}")
    Copy(run, BUCKET).send()
    store.get("/bucket/digits", f"{tmp_path}/fetched", recursive=True)
    for step in (10, 20):
        assert_is_of_step(read_checkpoint(tmp_path / "fetched/checkpoints" / step_name(step)), step)


def test_what_a_killed_sender_left_is_removed(run: Path) -> None:
    store = fsspec.filesystem("memory")
    Copy(run, BUCKET).send()
    complete = stored_names()
    for name in (".partial-12-metrics.jsonl", f"checkpoints/{step_name(10)}/.partial-34-{VARIABLES_FILE}"):
        store.pipe_file(f"/bucket/digits/{name}", b"half of it")
    store.pipe_file("/bucket/other/.partial-56-metrics.jsonl", b"of another run")
    Copy(run, BUCKET).send()
    assert stored_names() == complete
    assert store.exists("/bucket/other/.partial-56-metrics.jsonl")


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", VARIABLES_FILE])
def test_a_store_that_fails_in_the_middle_keeps_what_it_had(
    name: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fsspec.filesystem("memory")
    Copy(run, BUCKET).send()
    before = {path: store.cat_file(path) for path in store.find("/bucket")}
    (run / "config.yaml").write_text("workload: digits\noptimizer: {lr: 0.2}\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "end", "time": 6.0}) + "\n")
    save(run / "checkpoints", 30)
    open_file = MemoryFileSystem._open

    def fail(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb" and path.endswith(name):
            raise ConnectionError("down")
        return open_file(self, path, mode, **options)

    monkeypatch.setattr(MemoryFileSystem, "_open", fail)
    with pytest.raises(ConnectionError):
        Copy(run, BUCKET).send()
    monkeypatch.undo()
    after = {path: store.cat_file(path) for path in store.find("/bucket")}
    assert {path: after[path] for path in before if not path.endswith(("config.yaml", "metrics.jsonl"))} == {
        path: content for path, content in before.items() if not path.endswith(("config.yaml", "metrics.jsonl"))
    }
    failed = next(path for path in before if path.endswith(name))
    assert after[failed] == before[failed]
    assert not [path for path in after if "partial" in path]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("memory://runs", "is the memory of a process"),
        ("file://runs", "is relative to the working directory; it must be absolute, such as file:///"),
        ("local://./runs", "is relative to the working directory"),
        ("file://", "is relative to the working directory"),
        ("nothing://runs", "cannot be used"),
    ],
)
def test_an_address_that_keeps_nothing_is_refused(address: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        require_store(address)
