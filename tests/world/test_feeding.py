"""Ranks that are fed their own samples: exact means, and no rank waits."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ringtrain.run.checkpoint import read_checkpoint
from tests.world.conftest import RunRingtrain
from tests.world.processes import REPOSITORY
from tests.world.running import events
from tests.world.workloads.fed import Sample, streaming_batches
from tests.world.workloads.sequences import COUNT, Sentences, sentences

WORKLOADS = REPOSITORY / "tests/world/workloads/fed.py"
SENTENCES = REPOSITORY / "tests/world/workloads/sequences.py"
FED = ["--workload", f"{WORKLOADS}:Fed", "--precision", "float64", "--log_every", "1"]


RARER_CASES = [(1, "generator"), (3, "generator"), (1, "callable"), (2, "callable")]


def train_plainly(steps: Iterator[Sample]) -> tuple[np.ndarray, float, list[float]]:
    """What momentum makes of the mean squared error of each step's samples: kernel, bias and losses."""
    weights, velocity, losses = np.array([1.0, 1.0, 1.0, 0.0]), np.zeros(4), []
    for x, y in steps:
        features = np.concatenate([x, np.ones_like(y)], axis=1)
        errors = features @ weights - y[:, 0]
        losses.append(float(np.mean(errors**2)))
        velocity = 0.875 * velocity - 0.125 * 2 * features.T @ errors / len(errors)
        weights = weights + velocity
    return weights[:3], float(weights[3]), losses


def joined_steps(size: int) -> Iterator[Sample]:
    """The samples of all ranks, step by step."""
    for batches in itertools.zip_longest(*(streaming_batches(rank) for rank in range(size))):
        there = [batch for batch in batches if batch is not None]
        yield np.concatenate([x for x, _ in there]), np.concatenate([y for _, y in there])


def check(out: Path, expected: tuple[np.ndarray, float, list[float]], step: int) -> None:
    variables = read_checkpoint(out / f"checkpoints/step-{step:09d}").variables
    kernel, bias, losses = expected
    np.testing.assert_allclose(variables["weights/sequential/dense/kernel"][:, 0], kernel, rtol=1e-12)
    np.testing.assert_allclose(variables["weights/sequential/dense/bias"], [bias], rtol=1e-12)
    np.testing.assert_allclose([event["loss"] for event in events(out, "train")], losses, rtol=1e-12)


@pytest.mark.parametrize(
    ("size", "by"),
    [(3, "callable"), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, "generator"), *RARER_CASES])],
)
def test_uneven_ends_train_the_mean_of_each_step_s_samples(
    run_ringtrain: RunRingtrain, tmp_path: Path, size: int, by: str
) -> None:
    out = tmp_path / "run"
    arguments = [*FED, "--out", out, "--steps", "50", "--options.by", by]
    finished = run_ringtrain(arguments, launcher="mpirun" if size > 1 else None, np=size)
    assert finished.rc == 0, finished.stdout + finished.stderr
    check(out, train_plainly(joined_steps(size)), step=5)
    seen = [event["samples_seen"] for event in events(out, "train")]
    assert seen == list(itertools.accumulate(len(y) for _, y in joined_steps(size)))
    assert events(out)[-1]["status"] == "completed"
    again = run_ringtrain(arguments, launcher="mpirun" if size > 1 else None, np=size)
    assert "is complete" in again.stdout


@pytest.mark.slow
def test_a_run_whose_stream_ended_can_be_resumed_and_evaluated(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run_ringtrain([*FED, "--out", out, "--steps", "50"], launcher="mpirun").rc == 0
    longer = run_ringtrain([*FED, "--out", out, "--steps", "60"], launcher="mpirun")
    assert longer.rc == 0, longer.stdout + longer.stderr
    check(out, train_plainly(joined_steps(2)), step=5)
    evaluated = run_ringtrain(["eval", out, "--checkpoint", "newest", "--workload", f"{WORKLOADS}:Fed"])
    assert f"eval loss = {events(out, 'eval')[-1]['loss']:.4g}" in evaluated.stdout, evaluated.stderr


@pytest.mark.slow
def test_augmentation_is_the_same_after_a_resume(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    weights = []
    for name, lengths in (("at once", ["6"]), ("in two", ["4", "6"])):
        for steps in lengths:
            arguments = [*FED, "--options.noise", "0.5", "--options.steps_per_epoch", "3", "--steps", steps]
            assert run_ringtrain([*arguments, "--out", tmp_path / name], launcher="mpirun").rc == 0
        variables = read_checkpoint(tmp_path / name / "checkpoints/step-000000006").variables
        weights.append(variables["weights/sequential/dense/kernel"])
    np.testing.assert_array_equal(weights[0], weights[1])


@pytest.mark.slow
def test_each_epoch_starts_a_pass_and_a_run_resumes_by_replay(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = [*FED, "--options.steps_per_epoch", "3", "--out", out]
    assert run_ringtrain([*arguments, "--steps", "5"], launcher="mpirun").rc == 0
    other_size = run_ringtrain([*arguments, "--steps", "8"], launcher="mpirun", np=3)
    assert other_size.rc == 2
    assert "begun by 2 ranks, each fed its own samples, and now there are 3" in other_size.stderr
    finished = run_ringtrain([*arguments, "--steps", "8"], launcher="mpirun")
    assert "resuming from the checkpoint of step 5" in finished.stdout, finished.stdout + finished.stderr
    assert re.search(r"the pass was replayed up to its step 2, in \d+\.\d s", finished.stdout)
    pass_of_three = list(itertools.islice(joined_steps(2), 3))
    check(out, train_plainly(iter([*pass_of_three, *pass_of_three, *pass_of_three[:2]])), step=8)
    assert [event["epoch"] for event in events(out, "eval")] == [1, 1.6667, 2, 2.6667]


@pytest.mark.parametrize(
    ("options", "rc", "message"),
    [
        (["fault=shape"], 3, "rank 1 was fed (float64 [n, 2], float64 [n, 1]) in step 2; each batch must have"),
        (["fault=exception"], 1, "KeyError: 'the bug of the feed'"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (
                    ["fault=type"],
                    3,
                    "is fed (float64 [n, 3], float64 [n, 1]), but rank 1 (float32 [n, 3], float64 [n, 1])",
                ),
                (["fault=nothing"], 3, "no rank was fed a single batch"),
                (["steps_per_epoch=9"], 3, "no rank was fed anything for step 6 of an epoch, but steps_per_epoch is 9"),
            )
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_failing_stream_ends_all_ranks_with_its_reason(
    run_ringtrain: RunRingtrain, tmp_path: Path, options: list[str], rc: int, message: str
) -> None:
    arguments = [*FED, "--out", tmp_path / "run", "--steps", "50", *(f"--options.{option}" for option in options)]
    finished = run_ringtrain(arguments, launcher="mpirun", timeout=60)
    assert finished.rc == rc, finished.stdout + finished.stderr
    assert message in finished.stderr


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
def test_a_stream_of_unknown_length_is_trained_for_one_pass(
    run_ringtrain: RunRingtrain, tmp_path: Path, size: int
) -> None:
    out = tmp_path / "run"
    launcher = "mpirun" if size > 1 else None
    finished = run_ringtrain([*FED, "--out", out], launcher=launcher, np=size)
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert "one pass of unknown length" in finished.stdout
    check(out, train_plainly(joined_steps(size)), step=5)
    [evaluation] = events(out, "eval")
    assert evaluation["step"] == 5
    again = run_ringtrain([*FED, "--out", out], launcher=launcher, np=size)
    assert "is complete" in again.stdout


def test_a_schedule_needs_the_length_of_a_stream(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    finished = run_ringtrain([*FED, "--out", tmp_path / "run", "--optimizer.schedule", "cosine"])
    assert finished.rc == 2
    assert "optimizer.schedule is cosine, which needs it. Give --steps" in finished.stderr
    assert "assert_cardinality" in finished.stderr


def expected_losses_of_sentences(size: int) -> list[float]:
    """Train sentence by sentence: the same as a padded batch of those of all ranks, of any length."""
    import keras
    import tensorflow as tf

    policy_before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    model = Sentences().create_model()
    keras.config.set_dtype_policy(policy_before)
    all_sentences = sentences()
    losses = []
    for step in range(COUNT // (2 * size)):
        numbers = [(2 * step + row) * size + rank for rank in range(size) for row in range(2)]
        with tf.GradientTape() as tape:
            outputs = [model(tf.constant([all_sentences[number]], tf.int64)) for number in numbers]
            targets = [float(len(all_sentences[number])) for number in numbers]
            loss = tf.add_n([(out[0, 0] - y) ** 2 for out, y in zip(outputs, targets, strict=True)]) / len(numbers)
        for weight, gradient in zip(
            model.trainable_variables, tape.gradient(loss, [w.value for w in model.trainable_variables]), strict=True
        ):
            weight.assign(weight - 0.125 * tf.convert_to_tensor(gradient))
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    ("size", "by"), [(2, "padded_batch"), (3, "padded_batch"), pytest.param(1, "padded_batch", marks=pytest.mark.slow)]
)
def test_batches_that_differ_in_length_between_ranks_and_steps_train_exactly(
    run_ringtrain: RunRingtrain, tmp_path: Path, size: int, by: str
) -> None:
    launcher = "mpirun" if size > 1 else None
    arguments = ["--workload", f"{SENTENCES}:Sentences", "--out", tmp_path / "run", "--epochs", "1"]
    finished = run_ringtrain([*arguments, "--options.by", by], launcher=launcher, np=size)
    assert finished.rc == 0, finished.stdout + finished.stderr
    losses = [event["loss"] for event in events(tmp_path / "run", "train")]
    np.testing.assert_allclose(losses, expected_losses_of_sentences(size), rtol=1e-12)


@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_a_rank_without_sequences_takes_part_exactly(run_ringtrain: RunRingtrain, tmp_path: Path, backend: str) -> None:
    """Rank 0 has all sentences, so that two ranks train what one does; no length of rank 1 is known."""
    arguments = ["--workload", f"{SENTENCES}:Sentences", "--out", tmp_path / "run", "--epochs", "1"]
    more = ["--options.by", "rank 0 alone", "--backend", backend]
    finished = run_ringtrain([*arguments, *more], launcher="mpirun")
    assert finished.rc == 0, finished.stdout + finished.stderr
    losses = [event["loss"] for event in events(tmp_path / "run", "train")]
    np.testing.assert_allclose(losses, expected_losses_of_sentences(1), rtol=1e-12)


def test_buckets_of_sequences_train(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    arguments = ["--workload", f"{SENTENCES}:Sentences", "--out", tmp_path / "run", "--steps", "3"]
    finished = run_ringtrain([*arguments, "--options.by", "buckets"], launcher="mpirun")
    assert finished.rc == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_generators_whose_batches_differ_in_length_get_the_remedy(
    run_ringtrain: RunRingtrain, tmp_path: Path, size: int
) -> None:
    arguments = ["--workload", f"{SENTENCES}:Sentences", "--out", tmp_path / "run", "--steps", "3"]
    finished = run_ringtrain([*arguments, "--options.by", "generator"], launcher="mpirun", np=size)
    assert finished.rc == 3, finished.stdout + finished.stderr
    [line] = [line for line in finished.stderr.splitlines() if line.startswith("ringtrain: error")]
    assert "rank 0 is fed (int64 [n, 1], float64 [n]), but rank 1 (int64 [n, 2], float64 [n])" in line
    assert "padded_batch(of.local_batch_size)" in line
    assert "bucket_by_sequence_length" in line
    assert "the same code" not in line


@pytest.mark.parametrize("by", ["batch", pytest.param("one dataset", marks=pytest.mark.slow)])
def test_sequences_that_make_no_batch_get_one_line_with_the_remedy(
    run_ringtrain: RunRingtrain, tmp_path: Path, by: str
) -> None:
    arguments = ["--workload", f"{SENTENCES}:Sentences", "--out", tmp_path / "run", "--steps", "3"]
    finished = run_ringtrain([*arguments, "--options.by", by], launcher="mpirun")
    assert finished.rc == 3, finished.stdout + finished.stderr
    [line] = [line for line in finished.stderr.splitlines() if line.startswith("ringtrain: error")]
    assert "its samples have different shapes" in line
    assert "padded_batch(of.local_batch_size)" in line
    assert "bucket_by_sequence_length" in line
    assert "Traceback" not in finished.stderr


@pytest.mark.slow
def test_a_stream_cannot_be_verified_and_the_error_says_why(run_ringtrain: RunRingtrain) -> None:
    finished = run_ringtrain(["verify", "--workload", f"{WORKLOADS}:Fed", "--steps", "2", "--world_sizes", "1,2"])
    assert finished.rc == 2
    assert "other world sizes train other batches" in finished.stderr


def test_a_source_of_one_s_own_ends_the_run_with_its_error(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    arguments = ["--workload", f"{WORKLOADS}:Damaged", "--global_batch_size", "4", "--out", tmp_path / "run"]
    finished = run_ringtrain(arguments, launcher="mpirun")
    assert finished.rc == 1, finished.stdout + finished.stderr
    assert "file 3 ends too early" in finished.stderr
