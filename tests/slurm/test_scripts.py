"""What a user types, through a real sbatch; and every template's script, accepted by it."""

import re
import shlex
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.conftest import HOSTILE, HOSTILE_NAME
from tests.slurm.jobs import ON_ONE_NODE, RunJob, launch_slurm


def test_names_and_paths_are_passed_unchanged_and_not_executed(slurm: Cluster, undisturbed: RunJob) -> None:
    number, directory = undisturbed.number, undisturbed.out.parent
    assert slurm.ask("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%j") == f"{HOSTILE_NAME}\n"
    output, run = f"{HOSTILE_NAME}-{number}.out", f"run of {HOSTILE}"
    assert f"job {number} is submitted; it writes into {shlex.quote(output)}\n" in undisturbed.announced
    assert sorted(path.name for path in directory.iterdir()) == sorted([".launch", output, run])
    assert "\ndone: accuracy" in undisturbed.output
    assert not list(directory.parent.rglob("pwned"))


@pytest.mark.parametrize("name", ["a %j b", "a \\b"])
def test_a_directory_that_slurm_would_misread_is_refused(slurm: Cluster, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    finished = launch_slurm(slurm, "submit", *ON_ONE_NODE, cwd=tmp_path / name)
    assert finished.rc == 2
    assert f"launch: error: output is '%x-%j.out', in the directory {str(tmp_path / name)!r}" in finished.stderr


@pytest.mark.parametrize("option", ["job_name", "output", "partition"])
def test_a_line_break_is_refused(slurm: Cluster, tmp_path: Path, option: str) -> None:
    value = "a\n#SBATCH --wrap=true"
    finished = launch_slurm(slurm, "submit", *ON_ONE_NODE, f"--{option}", value, cwd=tmp_path)
    assert finished.rc == 2
    assert f"launch: error: {option} is {value!r}; it must be " in finished.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        ["--ranks_per_node", "2"],
        [
            *["--gpus_per_node", "2", "--mem", "2G", "--time", "2-00:00:00", "--partition", "all"],
            *["--account", "project", "--qos", "high", "--constraint", "fast"],
        ],
        ["--ranks_per_node", "1", "--mpi", "horovodrun", "--no_requeue", "--job_name", HOSTILE_NAME],
    ],
)
def test_sbatch_takes_every_template(cluster: Cluster, tmp_path: Path, options: list[str]) -> None:
    script = tmp_path / "job.sh"
    rendered = launch_slurm(cluster, "render", "--nodes", "2", *options, "--to", str(script), cwd=tmp_path)
    assert rendered.rc == 0, rendered.stderr
    tested = cluster.run(["sbatch", "--test-only", script])
    assert tested.rc == 0, tested.stderr


def test_each_rank_sees_all_gpus_of_its_node_and_its_own_cores(cluster: Cluster, tmp_path: Path) -> None:
    tell = tmp_path / "tell"
    tell.write_text('#!/bin/bash\necho "$SLURMD_NODENAME $SLURM_LOCALID $CUDA_VISIBLE_DEVICES $SLURM_CPUS_PER_TASK"\n')
    tell.chmod(0o755)
    options = ["--nodes", "2", "--gpus_per_node", "2", "--python", str(tell), "--mpi", "pmix"]
    finished = launch_slurm(cluster, "submit", *options, cwd=tmp_path)
    assert finished.rc == 0, finished.stderr
    number = int(finished.stdout.split()[1])
    assert cluster.wait_for_end(number, timeout=30) == "COMPLETED", cluster.output(number)
    ranks = re.findall(r"^n\d \d \S+ \d+$", cluster.output(number), re.MULTILINE)
    assert set(ranks) == {f"{node} {rank} 0,1 1" for node in ("n1", "n2") for rank in (0, 1)}
