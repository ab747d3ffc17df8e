"""The tests' own Slurm, and ringtrain started on it by plain srun."""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ringtrain.run.checkpoint import read_checkpoint
from tests.slurm.cluster import NODES, Cluster, pids_of_site
from tests.world.processes import REPOSITORY
from tests.world.running import final_checkpoint

DIGITS = f"{REPOSITORY / 'tests/world/workloads/endings.py'}:DigitsWithDigest"
SRUN = ["srun", "--mpi=pmix", "--kill-on-bad-exit=1"]


def write_script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    return path


def test_srun_runs_on_two_separate_hosts(cluster: Cluster) -> None:
    finished = cluster.run(["srun", "--nodes=2", "bash", "-c", "echo $(hostname) $(readlink /proc/self/ns/pid) $HOME"])
    assert finished.rc == 0, finished.stderr
    lines = [line.split() for line in finished.stdout.splitlines()]
    assert sorted(line[0] for line in lines) == list(NODES)
    assert len({line[1] for line in lines}) == 2, "the nodes see each other's processes"
    assert not finished.left_behind


def test_a_job_starts_again_after_its_node_has_lost_its_power(cluster: Cluster, tmp_path: Path) -> None:
    script = write_script(tmp_path / "job.sh", "echo on $SLURM_NODELIST", '[ "$SLURM_RESTART_COUNT" ] || srun sleep 60')
    job = cluster.submit(script, "--nodes=1", "--open-mode=append", f"--output={tmp_path / 'a b'}-%j.out")
    cluster.wait_for("rank", lambda: 0 in cluster.rank_pids(job), job, timeout=20)
    cluster.kill_node("n1")
    assert cluster.job_pids(job) == []
    cluster.report_down("n1")
    assert cluster.wait_for_end(job, timeout=30) == "COMPLETED"
    assert (cluster.output(job), cluster.restarts(job)) == ("on n1\non n2\n", 1)


def test_a_job_outlives_the_command_that_has_submitted_it(cluster: Cluster, tmp_path: Path) -> None:
    """What ends the rest of a command has to leave it alone, also where the job runs before the command has ended."""
    begin, end = tmp_path / "begin", tmp_path / "end"
    wait = f"for _ in {{1..300}}; do [ -e {end} ] && exit; sleep 0.1; done; exit 1"
    script = write_script(tmp_path / "job.sh", f"touch {begin}", wait)
    until_it_runs = f"sbatch --parsable --output=/dev/null {script}; until [ -e {begin} ]; do sleep 0.1; done"
    finished = cluster.run(["bash", "-c", until_it_runs], timeout=30)
    assert not finished.left_behind, "the job counts as a process of the command"
    end.touch()
    assert cluster.wait_for_end(int(finished.stdout), timeout=30) == "COMPLETED"


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_digits_trains_under_srun(cluster: Cluster, tmp_path: Path, num_nodes: int, ranks_per_node: int) -> None:
    start = [*SRUN, f"--nodes={num_nodes}", f"--ntasks-per-node={ranks_per_node}"]
    flags = ["--workload", DIGITS, "--steps", "6", "--global_batch_size", "64", "--out", str(tmp_path / "out")]
    finished = cluster.run(
        [*start, sys.executable, "-m", "ringtrain", *flags], env={"RINGTRAIN_TEST_DIGESTS": str(tmp_path)}, timeout=120
    )
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert finished.stderr == ""
    assert "2 ranks, started by srun; communication: " in finished.stdout
    hosts = dict(re.findall(r"^ +rank (\d) on (\S+)", finished.stdout, re.MULTILINE))
    assert hosts == {"0": "n1", "1": "n1" if num_nodes == 1 else "n2"}
    digests = [path.read_text() for path in tmp_path.glob("digest-*")]
    assert len(digests) == 2
    assert len(set(digests)) == 1, "ranks ended with different weights"
    assert not finished.left_behind


PARENT = """
import signal, time
from tests.slurm.cluster import Cluster
signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts the tests may ignore it
with Cluster() as cluster:
    print(cluster.site, flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_native_sums_on_two_nodes_equal_horovod_s(cluster: Cluster, tmp_path: Path) -> None:
    """Two ranks on each, which meet in the memory of their node, and by MPI those of the other."""
    variables, env = [], {"PYTHONPATH": str(REPOSITORY)}
    for backend in ("horovod", "native"):
        flags = ["--workload", "digits", "--steps", "20", "--precision", "float64", "--backend", backend]
        command = [*SRUN, "--nodes=2", "--ntasks-per-node=2", "--overcommit", sys.executable, "-m", "ringtrain", *flags]
        finished = cluster.run([*command, "--out", str(tmp_path / backend)], env=env, timeout=240)
        assert finished.rc == 0, finished.stderr
        variables.append(read_checkpoint(final_checkpoint(tmp_path / backend, 20)).variables)
    assert "natively" in finished.stdout
    for name, value in variables[0].items():
        np.testing.assert_allclose(variables[1][name], value, rtol=0, atol=1e-10 * max(1.0, np.abs(value).max()))


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_no_process_or_mount_of_a_cluster_outlives_its_parent(number: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY) as parent:
        assert parent.stdout is not None
        site = Path(parent.stdout.readline().strip())
        assert len(pids_of_site(site)) >= 10  # three hosts, munged, slurmctld, two slurmd
        parent.send_signal(number)
    end = time.monotonic() + 5
    while pids_of_site(site) and time.monotonic() < end:
        time.sleep(0.05)
    assert pids_of_site(site) == []
    assert str(site) not in Path("/proc/mounts").read_text()
    assert site.exists() == (number == signal.SIGKILL)
    shutil.rmtree(site, ignore_errors=True)
