"""Training where Horovod is not installed: ranks on cores sum natively, and MPI carries the rest.

``test_other_versions.py`` runs the tests of the step, and others, without it.
"""

import re
import sys
from pathlib import Path

import pytest

from ringtrain.collectives.native import library
from tests.world.conftest import RunRingtrain
from tests.world.environments import make_environment, uv_install
from tests.world.processes import REPOSITORY, clean_environment, run_command
from tests.world.running import digest, final_checkpoint

TRAIN = ["-m", "ringtrain", "--steps", "20", "--seed", "1", "--deterministic", "true"]


pytestmark = pytest.mark.native


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of an environment without Horovod."""
    interpreter, _ = make_environment(tmp_path / "without", without="horovod*")
    return interpreter


def mpirun(python: Path, *arguments: object, np: int = 2) -> list[str]:
    return ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(np), *map(str, (python, *arguments))]


@pytest.mark.slow
def test_it_trains_the_same_bits(python: Path, run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    there = run_command(mpirun(python, *TRAIN, "--out", tmp_path / "there"), env=clean_environment(), timeout=120)
    assert there.rc == 0, there.stderr
    assert "Horovod" not in there.stdout
    assert "communication: MPI, sums natively" in there.stdout
    here = run_ringtrain([*TRAIN[2:], "--out", tmp_path / "here"], launcher="mpirun")
    assert here.rc == 0, here.stderr
    assert digest(final_checkpoint(tmp_path / "there", 20)) == digest(final_checkpoint(tmp_path / "here", 20))


def test_a_benchmark_that_starts_horovodrun_is_refused(python: Path) -> None:
    flags = ["--size", "1", "--models", "CNN", "--contenders", "ringtrain,one_process", "--rounds", "1"]
    command = [str(python), "-m", "benchmarks", "step", *flags]
    refused = run_command(command, env=clean_environment(PATH="/usr/bin:/bin"), timeout=60)
    assert refused.rc == 2, refused.stderr
    [line] = refused.stderr.splitlines()
    assert "the contender ringtrain needs horovodrun, which is not in PATH." in line


@pytest.mark.slow
def test_a_layer_that_asks_the_other_ranks_trains_the_same_bits(
    python: Path, run_ringtrain: RunRingtrain, tmp_path: Path
) -> None:
    """SyncBatchNormalization, in micro-batches; two ranks, of which there is one sum."""
    workload = f"{REPOSITORY / 'tests/world/workloads/small.py'}:Normalized"
    flags = [*TRAIN, "--workload", workload, "--accumulate", "2"]
    there = run_command(mpirun(python, *flags, "--out", tmp_path / "there"), env=clean_environment(), timeout=120)
    assert there.rc == 0, there.stderr
    here = run_ringtrain([*flags[2:], "--backend", "horovod", "--out", tmp_path / "here"], launcher="mpirun")
    assert here.rc == 0, here.stderr
    assert digest(final_checkpoint(tmp_path / "there", 20)) == digest(final_checkpoint(tmp_path / "here", 20))


def test_ranks_that_communicate_in_different_ways_are_refused(tmp_path: Path) -> None:
    """As if one node's environment had no Horovod."""
    ranks: list[str] = []
    for backend in ("horovod", "native"):
        flags = [*TRAIN, "--backend", backend, "--out", str(tmp_path / "run")]
        ranks += [":", "-np", "1", sys.executable, *flags]
    finished = run_command(["mpirun", "--oversubscribe", *ranks[1:]], env=clean_environment(), timeout=60)
    assert finished.rc == 2, finished.stderr
    assert re.search(r"in different ways: rank 0 on \S+ by Horovod; rank 1 on \S+ by MPI\.", finished.stderr)
    assert finished.stderr.count("ringtrain: error: ") == 1


@pytest.mark.slow
def test_without_a_compiled_library_mpi_carries_all(python: Path, tmp_path: Path) -> None:
    hidden = library.LIBRARY.with_suffix(".hidden")
    library.LIBRARY.rename(hidden)
    try:
        finished = run_command(mpirun(python, *TRAIN, "--out", tmp_path / "run"), env=clean_environment(), timeout=120)
    finally:
        hidden.rename(library.LIBRARY)
    assert finished.rc == 0, finished.stderr
    assert "communication: MPI, and no sum natively: libringtrain.so is not there" in finished.stdout


# A rank of one of two nodes, as its launcher and its machine would say: NAME PROGRAM...
ON_NODE = 'hostname "$0"; MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 exec "$@"'


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_it_trains_the_same_bits_by_mpich(
    num_nodes: int, python: Path, run_ringtrain: RunRingtrain, tmp_path: Path
) -> None:
    uv_install(python, "--requirements", ".ci/locks/mpich.lock")
    train = [str(python), *TRAIN, "--backend", "native", "--out", str(tmp_path / "there")]
    ranks = ["-n", "2", *train]
    if num_nodes == 2:
        on_node = ["unshare", "--uts", "sh", "-c", ON_NODE]
        ranks = ["-n", "1", *on_node, "n1", *train, ":", "-n", "1", *on_node, "n2", *train]
    command = ["unshare", "--map-root-user", str(python.with_name("mpiexec")), "-localhost", "127.0.0.1", *ranks]
    as_here = {"TF_NUM_INTRAOP_THREADS": "1"}  # two nodes take all cores each
    there = run_command(command, env=clean_environment(**as_here), timeout=120)
    assert there.rc == 0, there.stderr
    assert "2 ranks, started by mpiexec (MPICH or Intel MPI); communication: MPI, sums natively" in there.stdout
    assert len(set(re.findall(r"rank \d on (\S+)", there.stdout))) == num_nodes
    here = run_ringtrain([*TRAIN[2:], "--out", tmp_path / "here"], launcher="mpirun")
    assert here.rc == 0, here.stderr
    assert digest(final_checkpoint(tmp_path / "there", 20)) == digest(final_checkpoint(tmp_path / "here", 20))
