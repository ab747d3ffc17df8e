"""Checkpoints: a write that does not come to its end leaves whole ones, and loses none."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringtrain.files import atomic
from ringtrain.run.checkpoint import Checkpoint, read_checkpoint
from ringtrain.run.store import find_best, find_newest, remove_unfinished, step_name, write_checkpoint
from tests.unit.checkpoints import FILES, assert_is_of_step, make_checkpoint, read_tree, save


@pytest.mark.parametrize("is_best", [False, True])
def test_a_fenced_writer_changes_nothing(tmp_path: Path, is_best: bool) -> None:
    for step in (1, 2):
        save(tmp_path, step, is_best=is_best)
    before = read_tree(tmp_path)

    def refuse() -> None:
        raise PermissionError("taken over")

    for step in (2, 3):
        with pytest.raises(PermissionError, match="taken over"):
            write_checkpoint(tmp_path, make_checkpoint(step, 50), is_best=is_best, may_write=refuse)
        assert read_tree(tmp_path) == before


def test_the_fence_is_checked_just_before_the_rename(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    write_checkpoint(
        tmp_path,
        make_checkpoint(1),
        is_best=False,
        may_write=lambda: seen.append(sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))),
    )
    temporary = seen[0][0]
    assert temporary.startswith(f".writing-{step_name(1)}-")
    assert seen == [[temporary, *(f"{temporary}/{file}" for file in FILES)]]


def test_all_files_are_flushed_to_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: dict[str, int] = {}

    def flush(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        flushed[re.sub("[0-9a-f]{16}", "TOKEN", name)] = os.fstat(descriptor).st_size

    monkeypatch.setattr(atomic, "flush", flush)
    path = save(tmp_path, 1, is_best=True)
    sizes = {name: (path / name).stat().st_size for name in FILES}
    assert {name: flushed[name] for name in sizes} == sizes
    names = {f".writing-{path.name}-TOKEN", tmp_path.name, tmp_path.parent.name}
    assert names <= set(flushed), "and the names themselves"


def test_no_file_descriptor_is_leaked(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    read_checkpoint(save(tmp_path, 1, is_best=True))
    assert os.listdir("/proc/self/fd") == before


def test_a_value_that_is_not_json_leaves_no_files(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = read_tree(tmp_path)
    with pytest.raises(TypeError):
        write_checkpoint(tmp_path, Checkpoint(step=2, variables={}, progress={"best": object()}, run={}), is_best=False)
    assert read_tree(tmp_path) == before


FILL_UP = """
import json, os, resource, sys
from pathlib import Path
import numpy as np
from ringtrain.run.checkpoint import Checkpoint, read_checkpoint
from ringtrain.run.store import write_checkpoint

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


@pytest.mark.parametrize("kind", list(kinds_of_full()))
def test_a_full_disk_is_an_error_and_changes_nothing(tmp_path: Path, kind: str) -> None:
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
from ringtrain.run.checkpoint import Checkpoint
from ringtrain.run.store import find_newest, remove_unfinished, tidy, write_checkpoint

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


def test_a_writer_killed_at_any_moment_loses_no_checkpoint(tmp_path: Path) -> None:
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
        if path.suffix == "" and not path.name.startswith(".") and path.exists():  # `best` may mean one just replaced
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
        named = find_best(root)
        assert named is not None
        best = read_checkpoint(named)
        assert_is_of_step(best, best.step)
        assert best.step >= announced["best"]
