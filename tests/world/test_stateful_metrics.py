"""Keras metrics with a state have the values of one process, on any number of ranks."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ringtrain.collectives import Collective
from ringtrain.config import make_config
from ringtrain.errors import UsageError
from ringtrain.training.job import Job, create_job
from ringtrain.training.loop import run_steps
from ringtrain.training.session import RunSession
from tests.world.conftest import RunRingtrain
from tests.world.group import BY_MPI, on_ranks
from tests.world.processes import REPOSITORY
from tests.world.running import events
from tests.world.workloads.stateful import NUM_EVALUATED, LastError, Stateful, WithOwnMetrics, samples

WORKLOAD = f"{REPOSITORY}/tests/world/workloads/stateful.py:Stateful"
NAMES = ["auc", "recall", "root", "largest"]


def start_job(collective: Collective, workload: Stateful, **settings: Any) -> Job:
    keras.utils.clear_session(free_memory=False)
    config = make_config({"steps": 3, **settings}, Stateful.defaults, {})
    job = create_job(workload, config, collective, num_threads=1)
    job.step.share_values(collective)
    return job


def plain_values(model: keras.Model, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Compute the metrics with Keras alone, over all samples at once."""
    values = {}
    for name, metric in Stateful().create_metrics().items():
        metric.update_state(y, model(x))
        values[name] = float(metric.result())
    return values


@on_ranks(1, 2, 3, BY_MPI)
def test_an_evaluation_gives_the_values_over_all_samples(collective: Collective) -> None:
    """Also a second one, which forgets the first; the last batch has one sample, so that some ranks have none."""
    job = start_job(collective, Stateful())
    expected = plain_values(job.step.model, *samples(100, NUM_EVALUATED))
    for _ in range(2):
        report = job.evaluate()
        assert report is not None
        assert {name: report.metrics[name] for name in NAMES} == pytest.approx(expected, rel=1e-12)
        assert "accuracy" in report.metrics


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"steps_per_call": "2"}], ids=str)
@on_ranks(1, 2, 3, BY_MPI)
def test_training_collects_the_samples_since_the_last_line(collective: Collective, settings: dict[str, Any]) -> None:
    job = start_job(collective, Stateful(), optimizer={"name": "sgd", "lr": 1e-30}, **settings)
    expected = plain_values(job.step.model, *samples(0, 22))  # an epoch, with weights that do not change
    run_steps(job, RunSession(job.config, collective), [])
    values = job.step.stateful_metrics.merge_and_reset(collective, name="test")
    assert values == pytest.approx(expected, rel=1e-12)
    assert not any(float(np.sum(variable.numpy())) for variable in job.step.stateful_metrics.variables)


@on_ranks(2, slow=[1, 3])
def test_a_skipped_step_is_not_counted(collective: Collective) -> None:
    job = start_job(collective, Stateful())
    job.batches.begin()
    batch = next(iter(job.times.waiting_for(job.batches)))
    spoiled = batch._replace(x=batch.x * np.nan) if collective.world.is_rank0 else batch
    assert not job.step.read(job.step(spoiled, 0.1)).is_finite
    assert not any(float(np.sum(variable.numpy())) for variable in job.step.stateful_metrics.variables)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"last": LastError}, r"the metric 'last' \(LastError\) has a state that cannot be merged .* merge_state"),
        (
            {"precise": lambda: keras.metrics.Precision(thresholds=[0.2, 0.5])},
            r"the metric 'precise' \(Precision\) has no single value",
        ),
        ({"f1": keras.metrics.F1Score}, r"the metric 'f1' \(F1Score\) does not take y, int64 \[n\], and the outputs"),
        ({"accuracy": keras.metrics.BinaryAccuracy}, "gives 'accuracy' in metrics and in create_metrics"),
        ({"loss": keras.metrics.AUC}, "create_metrics gives 'loss', but metrics.jsonl keeps something else"),
        ({"auc": lambda: 1.0}, r"must give a dict of names and Keras metrics"),
    ],
    ids=["last", "values", "shape", "twice", "reserved", "no metric"],
)
def test_metrics_that_cannot_be_right_are_refused_by_name(
    chosen: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringtrain.collectives.base import Solo
    from ringtrain.runtime.world import World

    monkeypatch.setattr(WithOwnMetrics, "chosen", chosen)
    world = World(rank=0, size=1, local_rank=0, local_size=1, node="node", launcher="no launcher")
    with pytest.raises(UsageError, match=message):
        start_job(Solo(world), WithOwnMetrics(), best_metric="loss")


def test_lines_and_the_best_evaluation_are_those_of_one_process(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    lines = {}
    for size, backend in ((1, "auto"), (2, "horovod"), (3, "native")):
        out = tmp_path / f"run-{size}"
        arguments = ["--workload", WORKLOAD, "--out", out, "--steps", "7", "--eval_every", "3", "--log_every", "2"]
        launcher = "mpirun" if size > 1 else None
        finished = run_ringtrain([*arguments, "--backend", backend], launcher=launcher, np=size)
        assert finished.rc == 0, finished.stdout + finished.stderr
        assert "best auc" in finished.stdout
        lines[size] = [[event[name] for name in NAMES] for kind in ("train", "eval") for event in events(out, kind)]
    assert len(lines[1]) == 4 + 3
    for size in (2, 3):
        np.testing.assert_allclose(lines[size], lines[1], rtol=1e-9)
