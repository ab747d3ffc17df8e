"""Jobs that end without their run being complete, and what they say."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ON_ONE_NODE, ON_TWO_NODES, STEP_SECONDS, RunJob, lasting, send, submit, submit_by_hand
from tests.world.running import last_step

SLOW = ("--env", f"{STEP_SECONDS}=0.2")


def test_a_second_job_is_refused_and_a_killed_rank_requeues(cluster: Cluster, tmp_path: Path) -> None:
    """As often as --max_restarts says, as there is no newer checkpoint."""
    saves_nothing = [*lasting(tmp_path / "run"), "--checkpoint_every", "1000"]
    options = (*ON_TWO_NODES, "--max_restarts", "1", "--env", f"{STEP_SECONDS}=1")
    job = submit(cluster, tmp_path / "run", *options, program=saves_nothing)
    job.wait_for_step(1)
    second = submit(cluster, tmp_path / "run", "--nodes", "1", "--ranks_per_node", "1")
    assert (second.wait_for_end(), cluster.exit_code(second.number)) == ("FAILED", 2)
    held = rf"process \d+ on n1, job {job.number}\."
    assert re.search(held, second.said[-1]), second.output
    assert cluster.state(job.number) == "RUNNING"

    os.kill(cluster.rank_pids(job.number)[1], signal.SIGKILL)
    killed = time.monotonic()
    job.wait_for_restarts(1)
    assert time.monotonic() - killed < 15
    assert "task 1 on n2: Killed" in job.said[-1]
    assert job.said[-1].endswith("restart 1 of at most 20, 1 of at most 1 from the beginning.")

    job.wait_for_starts(2)
    os.kill(cluster.rank_pids(job.number)[0], signal.SIGKILL)
    assert job.wait_for_end() == "FAILED"
    assert "2 starts have failed since the beginning, and --max_restarts is 1" in job.said[-1]
    assert cluster.restarts(job.number) == 1
    assert cluster.job_pids(job.number) == []
    assert list((tmp_path / ".launch").iterdir()) == []


def test_a_cancelled_job_saves_and_does_not_start_again(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path / "run", *ON_ONE_NODE, *SLOW)
    job.wait_for_step(2)
    cluster.cancel(job.number)
    assert job.wait_for_end() == "CANCELLED"
    assert cluster.restarts(job.number) == 0
    assert (job.out / "checkpoints" / f"step-{last_step(job.out):09d}").is_dir(), "it has not saved"
    assert cluster.job_pids(job.number) == []


@pytest.mark.slow
def test_without_requeue_another_job_resumes_up_to_the_limit(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = submit_by_hand(cluster, out, *ON_ONE_NODE, *SLOW, "--max_requeues", "1", sbatch="--no-requeue")
    first.wait_for_step(3)
    send(first)
    assert (first.wait_for_end(), cluster.exit_code(first.number)) == ("FAILED", 75)
    saved = last_step(out)
    found = re.search(r"^job (\d+) continues when this one has ended", first.said[-1])
    assert found, first.output

    second = RunJob(cluster, int(found[1]), out)
    second.wait_for_starts(2)
    assert second.starts[1]["first_step"] == saved
    second.wait_for_step(saved + 2)
    send(second)
    assert (second.wait_for_end(), cluster.exit_code(second.number)) == ("FAILED", 75)
    assert second.said[-1].endswith("Not started again: 1 restarts are behind it, and --max_requeues is 1."), (
        second.output
    )
    assert cluster.ask("squeue", "--noheader") == ""
