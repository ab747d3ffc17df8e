"""Checkpoints to save, damage and compare in tests."""

import os
from pathlib import Path

import numpy as np

from ringtrain.run.checkpoint import MANIFEST_FILE, VARIABLES_FILE, Checkpoint
from ringtrain.run.store import write_checkpoint

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
    root.parent.mkdir(parents=True, exist_ok=True)
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


def shorten_by_one(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)
