"""The transport of the native backend, without TensorFlow: exact, and clean under the sanitizers."""

import functools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ringtrain.collectives.native import build
from ringtrain.collectives.native.build import FLAGS
from tests.world.processes import REPOSITORY

NATIVE = REPOSITORY / "ringtrain/collectives/native"
SOURCES = [NATIVE / "sums.cc", NATIVE / "transport.cc", Path(__file__).with_name("transport_test.cc")]
SANITIZERS: dict[str, list[str]] = {
    "none": [],
    "thread": ["-g", "-fsanitize=thread"],
    "address": ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
NUM_CALLS = 50

CASES = [  # (sanitizer, how, nodes, ranks of a node)
    ("none", "threads", 1, 2),
    *(("none", "processes", nodes, size) for nodes, size in ((1, 3), (2, 2), (5, 1))),
    pytest.param("none", "processes", 3, 2, marks=pytest.mark.slow),
    *(pytest.param("none", how, 1, 7, marks=pytest.mark.slow) for how in ("threads", "processes")),
    pytest.param("address", "processes", 1, 3, marks=pytest.mark.slow),
    pytest.param("address", "processes", 3, 2, marks=pytest.mark.slow),
    pytest.param("thread", "threads", 1, 3, marks=pytest.mark.slow),  # this sanitizer sees one process only
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The test program, with a sanitizer or without."""

    @functools.cache
    def compile_with(sanitizer: str) -> Path:
        path = tmp_path_factory.mktemp("transport") / sanitizer
        flags = [*SANITIZERS[sanitizer], "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, *flags, f"-I{NATIVE}", *SOURCES, "-o", path], check=True, timeout=120)
        return path

    return compile_with


@pytest.mark.parametrize(("sanitizer", "how", "nodes", "size"), CASES)
def test_sums_are_those_of_the_ranks_in_their_order(
    compiled: Callable[[str], Path], sanitizer: str, how: str, nodes: int, size: int
) -> None:
    """Many calls of many kinds, results held and left; as processes also ranks that differ, end, or fail."""
    seed = nodes * size  # other calls in each case
    command = [str(compiled(sanitizer)), how, *map(str, (nodes, size, seed, NUM_CALLS))]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr


def test_the_operation_compiles_without_a_warning() -> None:
    compiler = os.environ.get("CXX", "g++")
    subprocess.run(
        [compiler, *FLAGS, "-Werror", "-fsyntax-only", *sorted(NATIVE.glob("*.cc"))], check=True, timeout=120
    )


def test_a_failed_compilation_removes_the_older_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libringtrain.so"
    monkeypatch.setattr(build, "LIBRARY", library)
    for compiler, reason in (("false", "false ended with 1: "), ("no-such-compiler", "No such file")):
        library.write_text("an older one")
        monkeypatch.setenv("CXX", compiler)
        found = build.compile_library()
        assert found is not None
        assert reason in found
        assert not library.exists()
