"""One Slurm for all tests of this directory, as new for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    with Cluster() as running:
        yield running


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    """A Slurm without jobs, whose two nodes are free."""
    yield slurm
    slurm.tidy()
