"""How ranks join natively: who gets the memory of a node, and which nodes can meet."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from ringtrain.collectives.connect import connect
from ringtrain.collectives.horovod import _mpi4py_size
from ringtrain.collectives.native import library
from ringtrain.collectives.native.backend import why_no_nodes
from ringtrain.collectives.native.memory import NAME, share_memory
from ringtrain.config import Config
from ringtrain.errors import UsageError
from ringtrain.runtime.environment import explaining_tensorflow
from ringtrain.runtime.world import GLOO_LAUNCHER, World
from ringtrain.training.joining import needs_of


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_the_native_backend_is_refused_without_mpi() -> None:
    """Horovod would carry all else, which this backend is to do without."""
    world = World(rank=0, size=2, local_rank=0, local_size=2, node="n1", launcher=GLOO_LAUNCHER)
    with pytest.raises(UsageError, match="needs MPI, but horovodrun --gloo starts ranks without MPI"):
        connect("native", world)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise OSError('libcudart.so.12: cannot open')", "OSError: libcudart.so.12: cannot open"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import missing_part", "ModuleNotFoundError: No module named 'missing_part'"),
        ("", "AttributeError: module 'horovod.tensorflow' has no attribute 'init'"),
    ],
)
def test_any_import_error_of_horovod_is_a_usage_error(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "horovod/tensorflow").mkdir(parents=True)
    (tmp_path / "horovod/__init__.py").touch()
    (tmp_path / "horovod/tensorflow/__init__.py").write_text(code)
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [sys.path[0], str(tmp_path), *sys.path[1:]])
    alone = World(rank=0, size=1, local_rank=0, local_size=1, node="n1", launcher="no launcher")
    try:
        with pytest.raises(UsageError) as raised:
            connect("horovod", alone)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
            del sys.modules[name]
    assert str(raised.value).startswith(f"Horovod cannot be loaded: {words}. It must be built against")


def test_any_import_error_of_mpi4py_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpi4py.py").write_text("raise RuntimeError('cannot load MPI library')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [sys.path[0], str(tmp_path), *sys.path[1:]])
    uses_mpi: Any = SimpleNamespace(mpi_enabled=lambda: True)
    alone = World(rank=0, size=1, local_rank=0, local_size=1, node="n1", launcher="no launcher")
    with pytest.raises(UsageError, match="mpi4py cannot be loaded: RuntimeError: cannot load MPI library"):
        _mpi4py_size(uses_mpi, alone)


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit("broken"), OSError("broken")])
def test_any_import_error_of_tensorflow_is_a_usage_error(error: BaseException) -> None:
    with (
        pytest.raises(UsageError, match=f"TensorFlow cannot be loaded: {type(error).__name__}: broken"),
        explaining_tensorflow(),
    ):
        raise error


def test_it_is_open_in_all_and_gone_with_the_last() -> None:
    before = open_descriptors()
    place: list[Any] = []

    def on_rank_0(value: Any) -> list[Any]:
        place.append(value)
        return [value, None]

    with share_memory(0, on_rank_0) as mine, share_memory(1, lambda value: [place[0], None]) as theirs:
        assert mine is not None
        assert theirs is not None
        os.ftruncate(mine, 5)
        assert os.fstat(theirs).st_size == 5
        assert os.get_inheritable(theirs) is False
    assert open_descriptors() == before


@pytest.mark.parametrize("which", ["a plain file", "no file", "no process", "other memory"])
def test_only_the_memory_of_rank_0_is_mapped(which: str, tmp_path: Path) -> None:
    """Another container's process may have the number that rank 0 has in its own."""
    descriptor = os.memfd_create(f"{NAME}-theirs")
    try:
        with (tmp_path / "file").open("wb+") as file:
            number = {"a plain file": file.fileno(), "no file": 10**6}.get(which, descriptor)
            place = [2**22 + 1 if which == "no process" else os.getpid(), number, f"{NAME}-ours"]
            with share_memory(1, lambda value: [place, None]) as memory:
                assert memory is None
    finally:
        os.close(descriptor)


def test_a_failed_memory_allocation_is_not_fatal() -> None:
    before, said = open_descriptors(), []

    def on_all(value: Any) -> list[Any]:
        said.append(value)
        return [value, False]

    with (
        mock.patch.object(os, "memfd_create", side_effect=OSError(24, "Too many open files")),
        share_memory(0, on_all) as memory,
    ):
        assert memory is None
    assert said == [None, None], "the others are told"
    assert open_descriptors() == before


def test_no_rank_joins_if_the_window_cannot_be_mapped(tmp_path: Path) -> None:
    assert library.load_operations() is not None
    with (tmp_path / "file").open("wb") as file:  # which cannot be read
        patience = library.Patience(0.0, 0.0)
        assert library.join(file.fileno(), 0, [os.getpid(), os.getpid()], patience, library.Nodes()) == -1


def test_a_library_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    library.load_operations.cache_clear()
    try:
        with mock.patch.object(library, "LIBRARY", tmp_path / "none.so"):
            assert library.load_operations() is None
    finally:
        library.load_operations.cache_clear()


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ("a0 a1", None),
        ("a0 a1 b0 b1", None),
        ("a0 b0 a1 b1", None),  # as mpirun --map-by node has them
        ("a0 a1 b0", "the nodes have not equally many ranks (2 on a, 1 on b)"),
        ("a0 a0", "nodes have the same name (a)"),  # two containers, for example
        ("a0 a1 a0 a1 b0 b1 b0 b1", "nodes have the same name (a, b)"),
    ],
)
def test_nodes_join_only_with_equal_local_ranks(places: str, reason: str | None) -> None:
    assert why_no_nodes([(place[0], int(place[1])) for place in places.split()]) == reason


@pytest.mark.parametrize("is_there", [True, False])
def test_one_operation_at_a_time_is_for_native_sums_alone(is_there: bool, tmp_path: Path) -> None:
    """Where the library was not compiled Horovod carries the sums, which travel beside another operation."""
    world = World(rank=0, size=2, local_rank=0, local_size=2, node="here", launcher="mpirun")
    with mock.patch.object(library, "LIBRARY", library.LIBRARY if is_there else tmp_path / "none.so"):
        assert needs_of(Config(), world, None).one_at_a_time is is_there
