"""One Slurm for all tests of this directory, as new for each."""

import time
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ON_TWO_NODES, RunJob, submit

HOSTILE = """it's "so" $(touch pwned) `touch pwned` ; touch pwned # é"""
HOSTILE_NAME = f"{HOSTILE} %j"


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    with Cluster() as running:
        yield running


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    """A Slurm without jobs, whose two nodes are free."""
    yield slurm
    slurm.tidy()


@pytest.fixture(scope="session")
def undisturbed(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> RunJob:
    """A job of two ranks, on two nodes, that nothing has interrupted. Its weights are those of any other.

    Its name, the directory that it was submitted in and that of the run hold all that a shell could take for commands.
    """
    directory = tmp_path_factory.mktemp("undisturbed") / HOSTILE
    directory.mkdir()
    submitted = time.monotonic()
    job = submit(slurm, directory / f"run of {HOSTILE}", *ON_TWO_NODES, "--job_name", HOSTILE_NAME)
    job.wait_for_step(1)
    job.start_seconds = time.monotonic() - submitted
    job.wait_for_end()
    return job
