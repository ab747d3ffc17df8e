"""`ringtrain verify` passes on what is right, and fails on each defect that is planted."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ringtrain.verify import fold_notes
from tests.world.conftest import RunRingtrain
from tests.world.group import on_ranks
from tests.world.processes import REPOSITORY, MarkedProcess, clean_environment

WORKLOADS = REPOSITORY / "tests/world/workloads"
SGD = ["--optimizer.name", "sgd", "--optimizer.lr", "0.05", "--optimizer.momentum", "0.9"]
OPTIMIZERS = {
    "adam": ["--optimizer.name", "adam"],
    "sgd": SGD,
    "adamw": ["--optimizer.name", "adamw", "--optimizer.weight_decay", "0.01"],
}
DEFECTS = [
    "a reduction that returns its input",
    "a mean of means",
    "a duplicated sample",
    "augmentation seeded by rank",
    "a weight that is not broadcast",
    "a slot that is not broadcast",
    "regularisation added on every rank",
]


@pytest.mark.parametrize(
    "optimizer", ["adam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "adamw"))]
)
def test_one_two_and_three_ranks_train_digits_alike(run_ringtrain: RunRingtrain, optimizer: str) -> None:
    """20 steps of 100 samples: 3 does not divide 100, and 100 does not divide the 1,347 samples."""
    finished = run_ringtrain(["verify", "--world_sizes", "1,2,3", *OPTIMIZERS[optimizer]], timeout=280)
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert "float64, 20 steps" in finished.stdout
    assert "DIFFERS" not in finished.stdout
    assert len(re.findall(r": \w+ +ok\b", finished.stdout)) == 2 * 2 * 6  # sizes, precisions, comparisons


@pytest.mark.slow
def test_verify_fails_with_exit_code_5_where_a_users_workload_is_wrong(run_ringtrain: RunRingtrain) -> None:
    workload = f"{WORKLOADS / 'wrong_by_rank.py'}:WrongByRank"
    finished = run_ringtrain(["verify", "--workload", workload, "--world_sizes", "1,2", "--steps", "3"], timeout=120)
    assert finished.rc == 5, finished.stdout + finished.stderr
    assert "2 against 1: weights    DIFFERS" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_verify_takes_its_processes_along_when_it_is_told_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ringtrain", "verify", "--world_sizes", "2,3", "--steps", "5000"]
    with (tmp_path / "log").open("wb") as log:
        process = MarkedProcess(command, clean_environment(), stdout=log, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 60
        while len(process.pids()) < 4:  # verify, mpirun and two ranks
            assert process.popen.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.05)
        process.popen.terminate()
        assert process.wait_until_gone(20)
        assert process.popen.returncode == 128 + signal.SIGTERM
    finally:
        process.end()


@on_ranks(2)
def test_what_differs_by_design_is_named_and_switched_off(collective: Any) -> None:
    from tests.world.workloads.small import DropoutAndBatchNorm

    findings, notes = findings_of(DropoutAndBatchNorm, collective)
    assert all(finding.passes for finding in findings), findings
    if collective.world.is_first:
        assert [note.split(":")[0] for note in notes] == ["normalization", "dropout"]


def test_layers_of_which_the_same_is_said_share_a_line() -> None:
    notes = [*(f"norm_{number}: frozen" for number in range(5)), "dropout: off"]
    assert fold_notes(notes) == ["norm_0, norm_1, norm_2 and 2 more layers: frozen", "dropout: off"]


@on_ranks(2)
def test_verify_passes_without_a_defect(collective: Any) -> None:
    from tests.world.workloads.small import Small

    findings, notes = findings_of(Small, collective)
    assert all(finding.passes for finding in findings), findings
    assert notes == []


@pytest.mark.parametrize("defect", DEFECTS)
@on_ranks(2)
def test_verify_fails_on_a_planted_defect(collective: Any, defect: str) -> None:
    from tests.world.workloads.small import Small

    findings, _ = findings_of(Small, collective, defect=defect)
    if collective.world.is_first:
        assert not all(finding.passes for finding in findings), findings


def findings_of(workload: Any, collective: Any, *, defect: str | None = None) -> tuple[list[Any], list[str]]:
    """Hold this group of ranks, with a defect planted, against one process without, as `ringtrain verify` does.

    Returns:
        On rank 0 the findings and the notes; nothing on the others.
    """
    from ringtrain.collectives.solo import Solo
    from ringtrain.config import make_config
    from ringtrain.record import record
    from ringtrain.verify import compare, load_record
    from ringtrain.world import World

    settings = {"steps": 12, "global_batch_size": 25, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}
    config = make_config(settings, workload.defaults)
    alone = World(rank=0, size=1, local_rank=0, local_size=1, node="here", launcher="no launcher")
    with tempfile.TemporaryDirectory() as directory:
        for name in ("one", "both"):
            (Path(directory) / name).mkdir()
        if collective.world.is_first:
            record(workload(), config, Solo(alone), Path(directory) / "one")
        with planted(defect, collective.world.rank):
            record(workload(), config, collective, Path(directory) / "both")
        if not collective.world.is_first:
            return [], []
        records = [load_record(Path(directory) / name / "float64.npz") for name in ("one", "both")]
        return compare(*records, precision="float64"), records[0]["notes"].tolist()


@contextlib.contextmanager
def planted(defect: str | None, rank: int) -> Iterator[None]:
    """Plant a defect in this rank's ringtrain."""
    from ringtrain import record, step, variables
    from ringtrain.collectives import Totals
    from ringtrain.collectives.horovod import HorovodCollective
    from ringtrain.data import augment, pipeline
    from ringtrain.data.order import SampleOrder

    right_plan, right_sharing = SampleOrder._plan, variables.share_first_values
    right_sum = HorovodCollective.sum_alone

    def mean_of_means(self: Any, *steps: int, rank: int, size: int) -> Any:
        planned = right_plan(self, *steps, rank=rank, size=size)
        return [batch._replace(global_count=size * len(batch.indices)) for batch in planned]

    def duplicated_sample(self: Any, *steps: int, rank: int, size: int) -> Any:
        planned = right_plan(self, *steps, rank=rank, size=size)
        for batch in planned if rank == 1 else ():
            batch.indices[-1] = batch.indices[0]
        return planned

    def without(kind: str) -> Any:
        return lambda variables, collective: right_sharing([v for v in variables if kind not in v.path], collective)

    def objective_of_each_rank(data_loss_sum: Any, regularization: Any, *, count: Any, global_count: Any) -> Any:
        del count
        return data_loss_sum / global_count + regularization

    def keys_of_each_rank(seed: int, epoch: Any, indices: Any) -> Any:
        return augment.sample_keys(seed + rank, epoch, indices)

    def its_input(self: Any, tensors: Any, **how: Any) -> Totals:
        return Totals(list(tensors)) if how["name"].startswith("gradients") else right_sum(self, tensors, **how)

    defects = {
        "a reduction that returns its input": (HorovodCollective, "sum_alone", its_input),
        "a mean of means": (SampleOrder, "_plan", mean_of_means),
        "a duplicated sample": (SampleOrder, "_plan", duplicated_sample),
        "augmentation seeded by rank": (pipeline, "sample_keys", keys_of_each_rank),
        "a weight that is not broadcast": (record, "share_first_values", without("small/output/kernel")),
        "a slot that is not broadcast": (record, "share_first_values", without("momentum")),
        "regularisation added on every rank": (step, "partial_objective", objective_of_each_rank),
    }
    with mock.patch.object(*defects[defect]) if defect else contextlib.nullcontext():
        yield
