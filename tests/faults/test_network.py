"""A cable that is pulled out between two nodes (`tests.world.network`), for a while and for good."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.world.network import Network
from tests.world.running import events, last_step, running

TIMEOUT = 6
FLAGS = ("--hang_timeout", str(TIMEOUT), "--checkpoint_every", "0", "--eval_every_epochs", "0", "--backend")
SLOW_STEP = {"RINGTRAIN_TEST_STEP_SECONDS": "0.05"}
SHORT_SECONDS = 1.0
ANSWER_SECONDS = TIMEOUT + 15  # as in test_watchdog
MOVING = 23  # past the first steps, which may take long


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(2) as nodes:
        yield nodes


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_a_run_continues_after_a_short_cut_of_the_network(network: Network, tmp_path: Path, backend: str) -> None:
    start = [*network.mpirun(), sys.executable, "-m", "ringtrain"]
    with running(tmp_path / "run", *FLAGS, backend, "--epochs", "20", start=start, env=SLOW_STEP) as run:
        run.wait_for_step(MOVING)
        network.connect("n2", "down")
        time.sleep(SHORT_SECONDS)
        before = last_step(run.out)
        time.sleep(SHORT_SECONDS)
        assert last_step(run.out) == before, "the network is not cut"
        network.connect("n2", "up")
        assert run.wait() == 0, run.text()
    assert [event["exit_code"] for event in events(run.out, "end")] == [0]
    assert "hang" not in run.text()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_a_long_cut_of_the_network_ends_the_run(network: Network, tmp_path: Path, backend: str) -> None:
    start = [*network.mpirun(), sys.executable, "-m", "ringtrain"]
    with running(tmp_path / "run", *FLAGS, backend, "--epochs", "1000", start=start, env=SLOW_STEP) as run:
        run.wait_for_step(MOVING)
        ranks = [run.rank_pid(rank) for rank in range(2)]
        network.connect("n2", "down")
        for rank in ranks:
            assert wait_for_exit(rank, ANSWER_SECONDS), run.text()
        # mpirun waits for its daemon on n2: with Open MPI 4.1 until TCP gives up, after a quarter of an hour.
        network.connect("n2", "up")
        assert run.wait() == 6, run.text()
    assert f"nothing has moved for {TIMEOUT} s: rank 1 on n2 has been silent for" in run.text()
    ends = events(run.out, "end")  # cut off from each other, both may write one, in which each names the other's node
    silent = re.compile("rank (1 on n2|0 on n1) has been silent for .*; rank [01] waits for it")
    named = [found[1] for end in ends if end["exit_code"] == 6 and (found := silent.search(end["message"]))]
    assert len(named) == len(set(named)) == len(ends) > 0, ends


def wait_for_exit(pid: int, timeout: float) -> bool:
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            return bool(select.select([descriptor], [], [], timeout)[0])
        finally:
            os.close(descriptor)
    return True
