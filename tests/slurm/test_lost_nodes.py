"""Nodes that go away under a run, whole or only for Slurm."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringtrain.runtime.run_record import read_end
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ON_ONE_NODE, ON_TWO_NODES, STEP_SECONDS, RunJob, assert_ended_as_if_undisturbed, submit
from tests.world.fork_server import SWITCH
from tests.world.running import events


@pytest.fixture(scope="module")
def larger_slurm() -> Iterator[Cluster]:
    with Cluster(("n1", "n2", "n3")) as running:
        yield running


@pytest.fixture
def three_nodes(larger_slurm: Cluster) -> Iterator[Cluster]:
    yield larger_slurm
    larger_slurm.tidy()


@pytest.mark.slow
def test_a_run_survives_lost_nodes_and_fences_their_writer(
    cluster: Cluster, tmp_path: Path, undisturbed: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "1")  # a stand-in of a forked rank cannot forward SIGSTOP
    job = submit(cluster, tmp_path / "run", *ON_ONE_NODE, "--env", f"{STEP_SECONDS}=0.25")
    job.wait_for_step(7)
    assert cluster.node(job.number) == "n1"
    ranks = cluster.rank_pids(job.number)
    os.kill(ranks[1], signal.SIGSTOP)  # rank 0, the writer, waits for it, and gives signs of life

    cluster.kill_slurmd("n1")  # the ranks live on
    cluster.report_down("n1")
    job.wait_for_starts(2)
    assert cluster.node(job.number) == "n2"
    assert job.starts[1]["first_step"] == 5, "not from the last whole checkpoint"
    job.wait_for_step(10)
    assert ranks[0] in cluster.job_pids(job.number), "there is nothing to be fenced"
    os.kill(ranks[1], signal.SIGCONT)
    cluster.wait_for(
        "end of the old writer", lambda: ranks[0] not in cluster.job_pids(job.number), job.number, timeout=20
    )
    told = read_end(tmp_path / ".launch" / f"{job.number}-0")
    assert told is not None
    assert re.search(rf"process \d+ on n2, job {job.number}; this process writes nothing more", str(told.message))

    assert len(cluster.rank_pids(job.number)) > 1, "the end of the old writer has ended the new one"
    cluster.restart_node("n1")
    cluster.kill_node("n2")
    cluster.report_down("n2")
    assert_ended_as_if_undisturbed(job, undisturbed, restarts=2)
    assert job.starts[2]["first_step"] % 5 == 0, "not from a checkpoint"


@pytest.mark.slow
def test_a_run_that_lost_one_of_two_nodes_waits_for_another(
    cluster: Cluster, tmp_path: Path, undisturbed: RunJob
) -> None:
    job = submit(cluster, tmp_path / "run", *ON_TWO_NODES, "--env", f"{STEP_SECONDS}=0.1")
    job.wait_for_step(7)
    assert cluster.node(job.number) == "n1"
    cluster.kill_node("n2")  # the batch script and rank 0 live on
    cluster.report_down("n2")
    cluster.wait_for_state(job.number, "PENDING", timeout=30)
    cluster.wait_for("end of rank 0", lambda: not cluster.job_pids(job.number), job.number, timeout=30)
    cluster.restart_node("n2")
    assert_ended_as_if_undisturbed(job, undisturbed, restarts=1)
    assert job.starts[1]["first_step"] >= 5


@pytest.mark.slow
@pytest.mark.parametrize("is_reported", [True, False])
def test_a_spare_node_replaces_a_lost_one_without_a_requeue(
    three_nodes: Cluster, tmp_path: Path, undisturbed: RunJob, is_reported: bool
) -> None:
    options = (*ON_TWO_NODES, "--spare_nodes", "1", "--no_requeue", "--env", f"{STEP_SECONDS}=0.1")
    job = submit(three_nodes, tmp_path / "run", *options)
    job.wait_for_step(7)
    assert three_nodes.node(job.number) == "n1"
    three_nodes.kill_node("n2")
    lost_at = time.time()
    if is_reported:
        three_nodes.report_down("n2")
    job.wait_for_starts(2)
    assert [{rank["node"] for rank in start["ranks"]} for start in job.starts] == [{"n1", "n2"}, {"n1", "n3"}]
    assert job.starts[1]["first_step"] >= 5
    assert_ended_as_if_undisturbed(job, undisturbed, restarts=0, starts=2)
    assert "launch: lost n2: the " in job.output
    assert re.search(r"start again .*, 1 of at most 3 from .* step \d", job.output)
    [restarted] = [event for event in events(job.out, "train") if "restart_sec" in event]
    assert restarted["time"] - lost_at - 1 <= restarted["restart_sec"] < 90  # Slurm notices a lost node after 27 s
    assert not list((tmp_path / ".launch").iterdir())


@pytest.mark.slow
def test_a_job_with_spare_nodes_that_lost_its_first_node_is_requeued(
    three_nodes: Cluster, tmp_path: Path, undisturbed: RunJob
) -> None:
    job = submit(three_nodes, tmp_path / "run", *ON_TWO_NODES, "--spare_nodes", "1", "--env", f"{STEP_SECONDS}=0.1")
    job.wait_for_step(7)
    three_nodes.kill_node("n1")
    three_nodes.report_down("n1")
    job.wait_for_restarts(1)
    three_nodes.restart_node("n1")
    assert_ended_as_if_undisturbed(job, undisturbed, restarts=1)
