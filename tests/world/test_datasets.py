"""Pipelines of tf.data's: what N ranks train by them, how a run goes on, and what is refused."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from ringtrain.data.sources import Pass
from ringtrain.run.checkpoint import read_checkpoint
from tests.world.conftest import RunRingtrain
from tests.world.processes import REPOSITORY
from tests.world.running import events
from tests.world.test_feeding import check, train_plainly
from tests.world.workloads.fed import Sample, samples
from tests.world.workloads.pipelines import COUNT, Sharded

PIPELINES = REPOSITORY / "tests/world/workloads/pipelines.py"
COMMON = ["--precision", "float64", "--log_every", "1", "--global_batch_size", "4"]
WHOLE = ["--workload", f"{PIPELINES}:Whole", *COMMON]
SHARDED = ["--workload", f"{PIPELINES}:Sharded", *COMMON]
STEPS_PER_PASS = 3  # of 4, 4 and 3 samples


def whole_steps(num_steps: int) -> Iterator[Sample]:
    """What one process trains on the whole dataset."""
    x, y = samples(0, COUNT)
    for step in range(num_steps):
        part = slice(4 * (step % STEPS_PER_PASS), 4 * (step % STEPS_PER_PASS) + 4)
        yield x[part], y[part]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_n_ranks_equal_one_on_the_whole_dataset(run_ringtrain: RunRingtrain, tmp_path: Path, size: int) -> None:
    out = tmp_path / "run"
    launcher = "mpirun" if size > 1 else None
    finished = run_ringtrain([*WHOLE, "--epochs", "2", "--out", out], launcher=launcher, np=size)
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert "every rank reads all samples, and takes its slice" in finished.stdout
    assert "warning" not in finished.stdout + finished.stderr
    check(out, train_plainly(whole_steps(6)), step=6)
    assert [event["samples_seen"] for event in events(out, "train")] == [4, 8, 11, 15, 19, 22]


SLOW_WAYS = [("unknown", True), ("", True), ("repeated", False)]


@pytest.mark.parametrize(
    ("endless", "has_moved"),
    [("unknown", False), ("", False), *(pytest.param(*way, marks=pytest.mark.slow) for way in SLOW_WAYS)],
)
def test_it_resumes_mid_pass_on_another_number_of_ranks(
    run_ringtrain: RunRingtrain, tmp_path: Path, endless: str, has_moved: bool
) -> None:
    """Augmented by the number of the sample in the pass, and shuffled anew in each, or with each repetition.

    Where its files may be others, as ``--data_dir`` is another, its samples are made once more.
    """
    noisy = [*WHOLE, "--options.noise", "0.5", "--options.shuffle", "true", f"--options.endless={endless}"]
    assert run_ringtrain([*noisy, "--steps", "5", "--out", tmp_path / "parts"], launcher="mpirun").rc == 0
    moved = ["--data_dir", tmp_path] if has_moved else []
    finished = run_ringtrain([*noisy, *moved, "--steps", "8", "--out", tmp_path / "parts"])
    assert finished.rc == 0, finished.stderr
    assert ("replayed" in finished.stdout) == has_moved, "the pipeline says itself where it was"
    assert run_ringtrain([*noisy, "--steps", "8", "--out", tmp_path / "whole"]).rc == 0
    names = "checkpoints/step-000000008"
    parts, whole = (read_checkpoint(tmp_path / run / names).variables for run in ("parts", "whole"))
    for name, value in whole.items():
        np.testing.assert_allclose(parts[name], value, rtol=1e-12, err_msg=name)


def sharded_steps(size: int, epochs: int) -> Iterator[Sample]:
    """What the ranks' own pipelines give, step by step."""
    workload = Sharded()
    tf.random.set_seed(0)  # as the run's seed
    for epoch in range(epochs):
        batches = [workload.read(Pass(rank, size, 0, epoch, 4 // size, 4)).as_numpy_iterator() for rank in range(size)]
        for step in itertools.zip_longest(*batches):
            there = [batch for batch in step if batch is not None]
            yield np.concatenate([x for x, _ in there]), np.concatenate([y for _, y in there])


def test_a_pipeline_of_each_rank_trains_the_mean_over_all(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    """Six samples in three batches on one rank, five on the other; as many steps as the longer one has.

    The run goes on in the middle of the second pass, by each rank's own state.
    """
    out = tmp_path / "run"
    for steps in (5, 6):
        finished = run_ringtrain([*SHARDED, "--steps", steps, "--out", out], launcher="mpirun")
        assert finished.rc == 0, finished.stdout + finished.stderr
        assert "samples fed by each rank" in finished.stdout
        assert "replayed" not in finished.stdout
    check(out, train_plainly(sharded_steps(2, epochs=2)), step=6)


@pytest.mark.slow
def test_ranks_that_read_the_very_same_are_warned(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    flags = [*SHARDED, "--options.shards", "false", "--epochs", "1", "--out", tmp_path / "run"]
    finished = run_ringtrain(flags, launcher="mpirun")
    assert finished.rc == 0, finished.stderr
    assert "warning: all 2 ranks are fed the very same first batch, so that each sample counts 2" in finished.stdout


@pytest.mark.parametrize(
    ("fault", "rc", "message"),
    [
        pytest.param(
            "another order",
            3,
            "the dataset gives rank 1 other samples than rank 0: the first 4, of which each rank",
            marks=pytest.mark.slow,
        ),
        pytest.param("no end", 2, "the length of the training is not known", marks=pytest.mark.slow),
        pytest.param("no pairs", 3, "each must be a pair (x, y). Make them so", marks=pytest.mark.slow),
        ("fewer, unknown", 3, "the dataset gives this rank 3 samples for step 2, but the ranks' slices"),
        pytest.param("fewer", 3, "3 batches on rank 0, 2 batches on rank 1", marks=pytest.mark.slow),
        pytest.param("batches", 3, "which are batches; they must be samples", marks=pytest.mark.slow),
        pytest.param("no samples", 3, "the dataset holds no samples", marks=pytest.mark.slow),
        pytest.param("ragged", 3, "its tensors must be dense", marks=pytest.mark.slow),
        pytest.param("a list", 3, "from_dataset got a list", marks=pytest.mark.slow),
    ],
)
def test_faults_end_the_run_with_their_cause(
    run_ringtrain: RunRingtrain, tmp_path: Path, fault: str, rc: int, message: str
) -> None:
    more = ["--steps", "9"] if fault == "fewer, unknown" else []
    flags = [*WHOLE, "--options.fault", fault, *more, "--out", tmp_path / "run"]
    finished = run_ringtrain(flags, launcher="mpirun", timeout=60)
    assert finished.rc == rc, finished.stdout + finished.stderr
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.slow
def test_a_whole_dataset_can_be_verified(run_ringtrain: RunRingtrain) -> None:
    flags = ["--workload", f"{PIPELINES}:Whole", "--global_batch_size", "4", "--steps", "5", "--world_sizes", "1,2,3"]
    finished = run_ringtrain(["verify", *flags], timeout=240)
    assert finished.rc == 0, finished.stdout + finished.stderr
