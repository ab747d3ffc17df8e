"""The rooms of the package: each imports only from rooms above it, and what must be quick does not start TensorFlow."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "ringtrain"


def read_rooms() -> list[str]:
    """The rooms from the top, as the first column of the package's README lists them."""
    rows = [line.split("|")[1] for line in (PACKAGE / "README.md").read_text().splitlines() if line.startswith("| `")]
    return [name.removesuffix("/").removesuffix(".py") for row in rows for name in re.findall(r"`([^`]+)`", row)]


ROOMS = read_rooms()
WITHOUT_TENSORFLOW = ["errors", "config", "schedule", "world", "devices", "run_directory", "console", "verify", "cli"]
WITHOUT_TENSORFLOW += [
    "doctor.command",
    "doctor.inside",
    "report",
    "checkpoint",
    "flags",
    "workloads.listing",
    "bench.command",
]
HEAVY = {"tensorflow", "keras", "horovod", "mpi4py", "sklearn"}

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST, package: str) -> Iterator[str]:
    """Every module that is imported anywhere below ``tree``, inside functions as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imported_rooms(path: Path) -> set[str]:
    package = ".".join(["ringtrain", *path.relative_to(PACKAGE).parts[:-1]])
    names = [name.split(".") for name in imported_modules(ast.parse(path.read_text()), package)]
    return {name[1] for name in names if name[0] == "ringtrain" and len(name) > 1 and name[1] in ROOMS}


def test_every_file_belongs_to_a_room() -> None:
    assert ROOMS[0] == "errors"
    assert {room_of(path) for path in FILES} - {"__init__"} == set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_from_rooms_above_it(path: Path) -> None:
    room = room_of(path)
    allowed = {*ROOMS[: ROOMS.index(room)], room} if room in ROOMS else set()
    assert imported_rooms(path) <= allowed


def test_imports_inside_functions_are_seen() -> None:
    tree = ast.parse("def f():\n    from ..loop import train\n    import ringtrain.cli\n")
    assert set(imported_modules(tree, "ringtrain.data")) == {"ringtrain.loop", "ringtrain.loop.train", "ringtrain.cli"}


def test_what_comes_before_the_devices_are_pinned_does_not_import_tensorflow() -> None:
    script = (
        f"import sys, {', '.join(f'ringtrain.{name}' for name in WITHOUT_TENSORFLOW)}, ringtrain.workloads.digits\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout == "[]\n"
