"""Samples and batches by their number: what N ranks train on them, and what is told of those that cannot be read."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ringtrain.run.checkpoint import read_checkpoint
from tests.world.conftest import RunRingtrain
from tests.world.environments import install, make_environment
from tests.world.processes import REPOSITORY, clean_environment, run_command
from tests.world.running import events
from tests.world.test_feeding import check, train_plainly
from tests.world.test_without_horovod import mpirun
from tests.world.workloads.fed import Sample, samples
from tests.world.workloads.numbered import RECORDS

WORKLOAD = f"{REPOSITORY}/tests/world/workloads/numbered.py:Numbered"
IN_PROCESSES = ["--options.by", "batches", "--options.processes", "true"]
IN_PROCESSES += ["--workload", "tests.world.workloads.numbered:Numbered"]  # which import the class of the batches
COMMON = ["--workload", WORKLOAD, "--precision", "float64", "--log_every", "1", "--global_batch_size", "4"]


def weights(out: Path, step: int) -> dict[str, np.ndarray]:
    return dict(read_checkpoint(out / f"checkpoints/step-{step:09d}").variables)


def test_samples_by_number_are_trained_as_arrays_are(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    """Shuffled by ringtrain, on three ranks, stopped in the middle, and gone on with on two."""
    for by, size, steps in (("arrays", 1, 6), ("number", 3, 4), ("number", 2, 6)):
        flags = [*COMMON, "--options.by", by, "--steps", steps, "--out", tmp_path / by]
        finished = run_ringtrain(flags, launcher="mpirun" if size > 1 else None, np=size)
        assert finished.rc == 0, finished.stdout + finished.stderr
    assert "replayed" not in finished.stdout
    assert [e["samples"] for e in events(tmp_path / "number", "eval")] == [11, 11, 11]
    expected, found = (weights(tmp_path / by, 6) for by in ("arrays", "number"))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)


@pytest.mark.slow
def test_samples_by_number_can_be_verified(run_ringtrain: RunRingtrain) -> None:
    flags = ["--workload", WORKLOAD, "--global_batch_size", "4", "--steps", "5", "--world_sizes", "1,2,3"]
    finished = run_ringtrain(["verify", *flags], timeout=240)
    assert finished.rc == 0, finished.stdout + finished.stderr


@pytest.mark.slow
def test_a_sample_that_raises_is_named(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    flags = [*COMMON, "--options.fault", "raises", "--epochs", "1"]
    finished = run_ringtrain([*flags, "--out", tmp_path / "stops"], launcher="mpirun")
    assert finished.rc == 3, finished.stdout + finished.stderr
    assert "sample 7, of the Samples: ValueError: record 7 is damaged" in finished.stderr
    assert "Traceback" not in finished.stderr


def batch_steps(size: int, epochs: int) -> Iterator[Sample]:
    """What the ranks' PyDatasets give, step by step."""
    for epoch in range(epochs):
        for index in range(3):
            ranks = range(size if index < 2 else 1)
            parts = [samples(100 * rank + 10 * epoch + 2 * index, 1 + index % 2) for rank in ranks]
            x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
            yield x, y


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["false", "true"])
def test_a_pydataset_per_rank_resumes_without_rereading(
    run_ringtrain: RunRingtrain, tmp_path: Path, processes: str
) -> None:
    more = IN_PROCESSES if processes == "true" else ["--options.by", "batches"]
    flags = [*COMMON, *more, "--out", tmp_path / "run"]
    for steps in (2, 6):
        finished = run_ringtrain([*flags, "--steps", steps], launcher="mpirun")
        assert finished.rc == 0, finished.stdout + finished.stderr
        assert not finished.left_behind
    assert "rank 0 reads batch 2 of pass 0" in finished.stderr
    assert "rank 0 reads batch 0 of pass 0" not in finished.stderr
    check(tmp_path / "run", train_plainly(batch_steps(2, epochs=2)), step=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "fault", "message"),
    [
        ("batches in processes", "raises", "batch 1 of the Batches cannot be read: ValueError: a batch is damaged"),
        ("number", "filtered", "it is None, as where a filter has left it out; each sample must be a pair (x, y)"),
        ("batches", "raises", "batch 1 of the Batches cannot be read: ValueError: a batch is damaged"),
        ("batches", "empty", "the dataset holds no samples"),
    ],
)
def test_faults_end_the_run_with_their_cause(
    run_ringtrain: RunRingtrain, tmp_path: Path, by: str, fault: str, message: str
) -> None:
    flags = [*COMMON, "--options.by", by, "--options.fault", fault, "--epochs", "1", "--out", tmp_path / "run"]
    if by == "batches in processes":
        flags = [*flags, *IN_PROCESSES]
    finished = run_ringtrain(flags, launcher="mpirun", timeout=120)
    assert finished.rc == 3, finished.stdout + finished.stderr
    assert message in finished.stderr
    assert not finished.left_behind
    assert "Traceback" not in finished.stderr


WRITE = """
import sys
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from tests.world.workloads.numbered import COUNT, samples
writer = ArrayRecordWriter(sys.argv[1], "group_size:1")
for number in range(COUNT):
    x, y = samples(number, 1)
    writer.write(np.concatenate([x[0], y[0]]).tobytes())
writer.close()
"""


GO_ON = """
import grain
import numpy as np
from ringtrain import Pass
from ringtrain.data.indexed import from_grain
from tests.world.workloads.numbered import Numbered, Samples
loader = lambda of: grain.DataLoader(
    data_source=Samples(), sampler=grain.samplers.IndexSampler(11, shuffle=True, num_epochs=1, seed=of.seed),
    operations=[grain.transforms.Batch(of.local_batch_size)],
)
for make in (lambda of: Numbered().batches(grain, of), loader):
    feed, of = from_grain(make), Pass(0, 1, 3, 0, 2, 2)
    batches = feed.open_pass(of, 0)
    for _ in range(2):
        next(batches)
    state = feed.read_state()
    assert 0 < len(state) < 10_000
    expected, found = [list(each) for each in (batches, feed.open_pass(of, 2, state))]
    assert len(expected) > 2
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
"""


@pytest.mark.slow
def test_grain_and_array_records_are_trained_as_arrays_are(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    python, _ = make_environment(tmp_path / "with-grain", without="grain*")
    install(python, ".ci/locks/examples.lock")
    subprocess.run([python, "-c", WRITE, tmp_path / RECORDS], check=True, timeout=60, cwd=REPOSITORY)
    subprocess.run([python, "-c", GO_ON], check=True, timeout=60, cwd=REPOSITORY)
    finished = run_ringtrain([*COMMON, "--options.by", "arrays", "--steps", "6", "--out", tmp_path / "arrays"])
    assert finished.rc == 0, finished.stderr
    for name, more, steps in (
        ("map", [], (4, 6)),
        ("records", ["--data_dir", tmp_path], (6,)),
        ("pass", ["--options.fault", "pass"], (2, 9)),  # of which there are fewer
    ):
        for count in steps:
            flags = [*COMMON, "--options.by", "grain", *more, "--out", tmp_path / name]
            finished = run_command(
                mpirun(python, "-m", "ringtrain", *flags, "--steps", count), env=clean_environment(), timeout=120
            )
            assert finished.rc == 0, finished.stdout + finished.stderr
    expected = weights(tmp_path / "arrays", 6)
    for name in ("map", "records"):
        for key, value in weights(tmp_path / name, 6).items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-12, err_msg=f"{name}: {key}")
    assert events(tmp_path / "pass", "train")[-1]["samples_seen"] == 11
    assert "replayed" not in finished.stdout
    flags = [*COMMON, "--options.by", "grain", "--options.fault", "endless", "--out", tmp_path / "endless"]
    endless = run_command(mpirun(python, "-m", "ringtrain", *flags), env=clean_environment(), timeout=120)
    assert endless.rc == 3
    assert "the samples of from_grain have no end. Leave repeat() out" in endless.stderr
