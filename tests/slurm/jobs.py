"""A run that a user submits with ``launch slurm submit``, and what becomes of it."""

import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.slurm.cluster import ENDED, Cluster
from tests.world.processes import REPOSITORY, Finished
from tests.world.running import WORKLOAD, assert_history_is_whole, digest, events, final_checkpoint, last_step

EPOCHS, STEPS = 6, 48  # of `Lasting`
STATE_SECONDS = 1.0  # between two looks whether the job has ended without what is waited for
START_SECONDS = 90.0  # a run's start takes 8 s on a quiet machine
ON_TWO_NODES = ("--nodes", "2", "--ranks_per_node", "1")
ON_ONE_NODE = ("--nodes", "1", "--ranks_per_node", "2")
STEP_SECONDS = "RINGTRAIN_TEST_STEP_SECONDS"


class RunJob:
    """A job of ``python -m ringtrain`` on the workload `Lasting`."""

    def __init__(self, cluster: Cluster, number: int, out: Path) -> None:
        self.cluster, self.number, self.out = cluster, number, out
        self.start_seconds = 0.0
        """how long it took from the submission to the first step, where somebody has waited for that"""
        self.announced = ""
        """what the submission has printed"""

    # --- What it has done ---

    @property
    def output(self) -> str:
        return self.cluster.output(self.number)

    @property
    def starts(self) -> list[dict[str, Any]]:
        return events(self.out, "start")

    @property
    def said(self) -> list[str]:
        """Lines of `launch` in the job's output."""
        return re.findall(r"^launch: (.+)$", self.output, re.MULTILINE)

    def final_weights(self) -> str:
        return digest(final_checkpoint(self.out, STEPS))

    # --- Waiting ---

    def wait_for_step(self, step: int) -> None:
        self._wait_for(f"step {step}", lambda: last_step(self.out) >= step)

    def wait_for_starts(self, starts: int) -> None:
        """Wait until so many starts have opened the run directory."""
        self._wait_for(f"start {starts}", lambda: len(self.starts) >= starts)

    def wait_for_restarts(self, restarts: int) -> None:
        """Wait until Slurm has put the job back into its queue so often."""
        self._wait_for(f"restart {restarts}", lambda: self.cluster.restarts(self.number) >= restarts)

    def _wait_for(self, what: str, is_there: Callable[[], bool]) -> None:
        next_look = time.monotonic()

        def is_there_or_never() -> bool:
            nonlocal next_look
            there = is_there()
            if there or time.monotonic() < next_look:
                return there
            next_look = time.monotonic() + STATE_SECONDS
            if self.cluster.state(self.number) in ENDED:
                record = self.cluster.describe(self.number)
                raise AssertionError(f"ended before {what}:\n{self.output}\n{record}\n{self.cluster.logs()}")
            return there

        self.cluster.wait_for(what, is_there_or_never, self.number, timeout=START_SECONDS)

    def wait_for_end(self) -> str:
        return self.cluster.wait_for_end(self.number, timeout=START_SECONDS)


def launch_slurm(cluster: Cluster, command: str, *options: str, flags: Sequence[str] = (), cwd: Path) -> Finished:
    """Run ``python -m launch slurm COMMAND OPTIONS -- FLAGS`` on the login host."""
    words = [sys.executable, "-m", "launch", "slurm", command, *options, "--", *flags]
    return cluster.run(words, env={"PYTHONPATH": str(REPOSITORY)}, cwd=cwd)


def lasting(out: Path) -> list[str]:
    """The flags of ringtrain for the run in ``out``."""
    return ["--workload", f"{WORKLOAD}:Lasting", "--deterministic", "true", "--out", str(out)]


def submit(cluster: Cluster, out: Path, *options: str, program: Sequence[str] = ()) -> RunJob:
    """Submit a run, or a script, from the directory that is to hold its run directory and its output.

    Its ranks are forked.
    """
    cluster.start_fork_servers()
    finished = launch_slurm(cluster, "submit", *options, flags=program or lasting(out), cwd=out.parent)
    assert finished.rc == 0, finished.stderr
    found = re.match(r"job (\d+) is submitted; it writes into ", finished.stdout)
    assert found, finished.stdout
    job = RunJob(cluster, int(found[1]), out)
    job.announced = finished.stdout
    return job


def submit_by_hand(cluster: Cluster, out: Path, *options: str, sbatch: str) -> RunJob:
    """Submit the script of a run with an option for sbatch that the script has otherwise."""
    script = out.with_suffix(".sh")
    rendered = launch_slurm(cluster, "render", *options, "--to", str(script), flags=lasting(out), cwd=out.parent)
    assert rendered.rc == 0, rendered.stderr
    number = cluster.submit(script, sbatch, env={"PYTHONPATH": str(REPOSITORY)}, cwd=out.parent)
    return RunJob(cluster, number, out)


def send(job: RunJob, *options: str, number: signal.Signals = signal.SIGUSR1) -> None:
    job.cluster.cancel(job.number, f"--signal={number.name.removeprefix('SIG')}", *options)


def assert_ended_as_if_undisturbed(
    job: RunJob, undisturbed: RunJob, *, restarts: int, starts: int | None = None
) -> None:
    """The job is complete after so many restarts by Slurm; it has every step once, and an undisturbed run's weights."""
    assert (job.wait_for_end(), job.cluster.exit_code(job.number)) == ("COMPLETED", 0), job.output
    assert job.cluster.restarts(job.number) == restarts
    assert len(job.starts) == (starts or restarts + 1)
    assert_history_is_whole(job.out, epochs=EPOCHS, steps=STEPS)
    assert job.final_weights() == undisturbed.final_weights()
    assert job.said[-1] == "the run is complete."
    assert job.cluster.job_pids(job.number) == []
