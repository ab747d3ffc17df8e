"""Runs as jobs of a real Slurm: told to stop, at their time limit, started again; always the same weights."""

import re
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import (
    ON_ONE_NODE,
    ON_TWO_NODES,
    START_SECONDS,
    STEP_SECONDS,
    STEPS,
    RunJob,
    assert_ended_as_if_undisturbed,
    launch_slurm,
    send,
    submit,
    submit_by_hand,
)
from tests.world.fork_server import SWITCH
from tests.world.running import digest, events, final_checkpoint, last_step


def test_a_run_on_two_nodes_trains_to_its_end(undisturbed: RunJob) -> None:
    assert_ended_as_if_undisturbed(undisturbed, undisturbed, restarts=0)
    hosts = dict(re.findall(r"^ +rank (\d) on (\S+)", undisturbed.output, re.MULTILINE))
    assert hosts == {"0": "n1", "1": "n2"}


def test_each_signal_saves_and_starts_the_job_again_once(cluster: Cluster, tmp_path: Path, undisturbed: RunJob) -> None:
    job = submit(cluster, tmp_path / "run", *ON_TWO_NODES, "--env", f"{STEP_SECONDS}=0.1")
    stopped_at = []
    for restarts, options in enumerate([(), ("--batch",)]):
        job.wait_for_starts(restarts + 1)
        job.wait_for_step(last_step(job.out) + 6)
        send(job, *options)
        job.wait_for_restarts(restarts + 1)
        assert cluster.restarts(job.number) == restarts + 1
        stopped_at.append(last_step(job.out))
        assert f"restart {restarts + 1} of " in job.said[-1]
    assert_ended_as_if_undisturbed(job, undisturbed, restarts=2)
    assert [start["first_step"] for start in job.starts] == [0, *stopped_at], "steps were lost"


@pytest.mark.slow
def test_a_fit_that_is_kept_starts_again_as_well(cluster: Cluster, tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("fit.py"))
    job = submit(cluster, tmp_path / "run", *ON_TWO_NODES, program=[script, str(tmp_path / "run")])
    job.wait_for_starts(1)
    job.wait_for_step(6)
    send(job)
    job.wait_for_restarts(1)
    assert (job.wait_for_end(), cluster.exit_code(job.number)) == ("COMPLETED", 0), job.output
    assert job.said[-1] == "the run is complete."
    assert [event["exit_code"] for event in events(job.out, "end")] == [75, 0]
    assert [event["step"] for event in events(job.out, "train")] == list(range(1, 121)), "each step once"


@pytest.mark.slow
def test_a_run_stops_before_its_time_limit_and_is_requeued(
    cluster: Cluster, tmp_path: Path, undisturbed: RunJob
) -> None:
    # Slurm tells it nothing. It leaves itself 10 s to save.
    options = (*ON_ONE_NODE, "--time", "9", "--env", f"{STEP_SECONDS}=0.25")
    job = submit_by_hand(cluster, tmp_path / "run", *options, sbatch="--signal=CONT@1")
    cluster.wait_for_state(job.number, "RUNNING", timeout=20)
    cluster.shorten(job.number, undisturbed.start_seconds + 14)
    job.wait_for_restarts(1)
    assert f"stopped by the end of Slurm job {job.number} at " in job.output
    assert "SIGUSR1" not in job.output
    stopped_at = last_step(job.out)
    cluster.lengthen(job.number, 9)
    assert_ended_as_if_undisturbed(job, undisturbed, restarts=1)
    assert [start["first_step"] for start in job.starts] == [0, stopped_at]


@pytest.mark.slow
def test_slurm_s_signal_before_the_time_limit_requeues_a_run(
    cluster: Cluster, tmp_path: Path, undisturbed: RunJob
) -> None:
    job = submit(cluster, tmp_path / "run", *ON_ONE_NODE, "--time", "9", "--env", f"{STEP_SECONDS}=1")
    job.wait_for_step(1)
    cluster.shorten(job.number, 110)  # less than the 120 s at which the signal comes; Slurm looks every 30 s
    job.wait_for_restarts(1)
    assert "stopped by SIGUSR1 at rank 0 on n1, SIGUSR1 at rank 1 on n1" in job.output
    cluster.lengthen(job.number, 9)
    assert_ended_as_if_undisturbed(job, undisturbed, restarts=1)


@pytest.mark.slow
def test_horovodrun_s_script_does_the_same_on_a_node_without_ssh(
    cluster: Cluster, tmp_path: Path, undisturbed: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "1")  # the batch script signals the children of horovodrun
    job = submit(cluster, tmp_path / "run", *ON_ONE_NODE, "--mpi", "horovodrun", "--env", f"{STEP_SECONDS}=0.1")
    job.wait_for_step(6)
    send(job, "--batch")
    job.wait_for_restarts(1)
    assert_ended_as_if_undisturbed(job, undisturbed, restarts=1)
    assert "2 ranks, started by mpirun" in job.output
    assert job.output.startswith(f"launch: job {job.number}, restart 0"), "what the first start said is gone"


@pytest.mark.slow
def test_the_runs_of_an_array_start_again_one_by_one(cluster: Cluster, tmp_path: Path) -> None:
    """Two runs at a time of three; the first is told to save while the second trains."""
    options = (*ON_ONE_NODE, "--array", "seed=1..3", "--array_limit", "2", "--env", f"{STEP_SECONDS}=0.1")
    too_many = launch_slurm(cluster, "submit", *ON_ONE_NODE, "--array", "seed=1..9999", cwd=tmp_path)
    assert (too_many.rc, "MaxArraySize is 1,001" in too_many.stderr) == (2, True), too_many.stderr
    job = submit(cluster, tmp_path / "runs", *options)
    first, second, third = [tmp_path / "runs" / f"seed={seed}" for seed in (1, 2, 3)]
    cluster.wait_for("both train", lambda: min(map(last_step, (first, second))) >= 6, job.number, timeout=START_SECONDS)
    shown = launch_slurm(cluster, "status", "runs", cwd=tmp_path).stdout
    assert re.search(rf"^seed=1 +running +{job.number}_0 running +\d+ of 48 ", shown, re.MULTILINE), shown
    assert re.search(rf"{job.number}_2 pending \(JobArrayTaskLimit\)", shown), shown
    assert not third.exists(), "more run than --array_limit"
    cluster.ask("scancel", "--signal=USR1", f"{job.number}_0")
    job.wait_for_end()
    cluster.wait_for(
        "all end", lambda: all(map(is_complete, (first, second, third))), job.number, timeout=START_SECONDS
    )
    assert [len(events(out, "start")) for out in (first, second, third)] == [2, 1, 1], "another run was requeued"
    assert len({digest(final_checkpoint(out, STEPS)) for out in (first, second, third)}) == 3, "they share a seed"
    shown = launch_slurm(cluster, "status", "runs", cwd=tmp_path).stdout
    # The job of a run that is complete may not have ended yet.
    assert len(re.findall(r"^seed=\d +completed .*\b48 of 48 ", shown, re.MULTILINE)) == 3, shown


def is_complete(out: Path) -> bool:
    return [event["exit_code"] for event in events(out, "end")][-1:] == [0]
