"""What is found out about a step that was not finite, and that no state is saved that is not."""

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.config import Config
from ringtrain.data.sources import from_arrays
from ringtrain.errors import DivergedError
from ringtrain.guard.replicas import require_finite_values
from ringtrain.run.variables import broadcast_variables
from ringtrain.training.job import Job, create_job
from ringtrain.training.loop import run_steps
from ringtrain.training.session import RunSession
from ringtrain.workloads.base import Sources
from tests.world.conftest import RunRingtrain
from tests.world.group import on_ranks
from tests.world.test_runs import WORKLOADS, error_lines, events
from tests.world.workloads.endings import Line

NUM_SAMPLES = 12


class Cusp(Line):
    """A loss that is finite everywhere, with a gradient that is not where the output is 0: in the last sample."""

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        x = np.ones((NUM_SAMPLES, 2), np.float32)
        x[-1] = 0
        return Sources(from_arrays(x, x.sum(axis=1)), None)

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return tf.sqrt(tf.square(outputs[:, 0]))


class NotANumber(Line):
    """A loss that is no number, whatever its scale."""

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return super().loss(y, outputs) * np.nan


class Unfinished(Line):
    """Weights that are not finite from the beginning, such as those of a damaged file."""

    def create_model(self) -> keras.Model:
        model = super().create_model()
        weight = model.trainable_variables[0]
        weight.assign(weight.value * np.nan)
        return model


class NothingOfNothing(Line):
    """A metric that is no number, such as the precision where nothing was found."""

    def metrics(self, y: tf.Tensor, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"precision": tf.zeros_like(y) / tf.zeros_like(y)}


def run(collective: Collective, workload: Line, **settings: Any) -> tuple[str, Job]:
    """How training ends, in the words of all ranks; and the job."""
    config = Config(global_batch_size=NUM_SAMPLES, steps=20, **settings)
    job = create_job(workload, config, collective, num_threads=1)
    broadcast_variables(job.step.variables, collective)
    with pytest.raises(DivergedError) as caught:
        run_steps(job, RunSession(job.config, collective), [])
    assert len(set(all_gather_object(collective, str(caught.value), name="message"))) == 1
    return str(caught.value), job


@pytest.mark.parametrize("accumulate", [1, 2])
@on_ranks(3)
def test_a_nonfinite_gradient_of_a_finite_loss_names_its_rank(collective: Collective, accumulate: int) -> None:
    message, job = run(collective, Cusp(), accumulate=accumulate)
    assert message.startswith("step 1: loss or gradient is not finite; every rank's loss is finite")
    mine = bool(NUM_SAMPLES - 1 in next(iter(job.batches)).indices.numpy())
    [culprit] = [rank for rank, is_it in enumerate(all_gather_object(collective, mine, name="culprit")) if is_it]
    assert f"At rank {culprit} the gradient of sequential" in message
    assert "/kernel and of 1 more was not finite." in message


@on_ranks(2)
def test_a_nan_loss_is_not_taken_for_a_loss_scale_overflow(collective: Collective) -> None:
    message, _ = run(collective, NotANumber(), precision="mixed_float16")
    assert message.startswith("step 1: ")


@pytest.mark.parametrize("accumulate", [1, 2])
@on_ranks(1, 2)
def test_a_metric_that_is_no_number_stops_no_step(collective: Collective, accumulate: int) -> None:
    config = Config(global_batch_size=NUM_SAMPLES, steps=1, accumulate=accumulate)
    job = create_job(NothingOfNothing(), config, collective, num_threads=1)
    broadcast_variables(job.step.variables, collective)
    report = job.step.read(job.step(next(iter(job.batches)), learning_rate=0.1))
    assert report.is_finite
    assert np.isnan(report.metrics["precision"])


@pytest.mark.parametrize("on_all", [True, False])
@on_ranks(2)
def test_values_that_are_not_finite_are_refused_by_name(collective: Collective, on_all: bool) -> None:
    job = create_job(Line(), Config(steps=1), collective, num_threads=1)
    variables = job.step.named_variables
    require_finite_values(variables, collective, step=3)
    name = next(name for name in variables if name.endswith("/bias"))
    if on_all or collective.world.rank == 1:
        variables[name].assign([np.inf])
    with pytest.raises(DivergedError, match=f"after step 3 not all values of {name} are finite") as caught:
        require_finite_values(variables, collective, step=3)
    assert caught.value.reach == "run"


def test_a_state_that_is_not_finite_is_never_saved(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    arguments = ["--workload", f"{WORKLOADS}:Line", "--optimizer.lr", "3e38", "--checkpoint_every", "1"]
    finished = run_ringtrain([*arguments, "--steps", "1", "--out", str(tmp_path / "out")])
    assert finished.rc == 4
    [message] = error_lines(finished)
    assert re.search(r"step 1 .*weights/sequential/dense/kernel", message)
    assert list((tmp_path / "out").glob("checkpoints/step-*")) == []
    assert events(tmp_path / "out")[-1]["status"] == "diverged"


@on_ranks(2)
def test_first_weights_that_are_not_finite_are_not_blamed_on_the_learning_rate(collective: Collective) -> None:
    for action in ("stop", "skip"):
        message, _ = run(collective, Unfinished(), on_nonfinite=action)
        assert re.search(
            r"Weights of rank 0 were not finite before the step: \S+\. They are those that create_model", message
        )
        assert "optimizer.lr" not in message
