"""Replicas that drift apart are found, whichever rank, variable and bit it is, and never saved; no others are."""

import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.config import Config, OptimizerConfig
from ringtrain.errors import ReplicasDifferError
from ringtrain.guard.replicas import ReplicaGuard
from ringtrain.keras import SyncBatchNormalization
from ringtrain.run.variables import broadcast_variables
from ringtrain.training.actions import CheckReplicas
from ringtrain.training.job import Job, create_job
from ringtrain.training.loop import run_steps
from ringtrain.training.session import RunSession
from tests.world.conftest import RunRingtrain
from tests.world.group import on_ranks
from tests.world.test_runs import WORKLOADS, error_lines, events
from tests.world.workloads.small import NUM_CLASSES, NUM_FEATURES, Small

STEPS, EVERY = 12, 4


class Busy(Small):
    """What could make replicas differ by design, or seem to: dropout, batch statistics, seeds."""

    def create_model(self) -> keras.Model:
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((NUM_FEATURES,)),
                layers.GaussianNoise(0.1),
                layers.Dense(8, activation="tanh"),
                SyncBatchNormalization(),
                layers.Dropout(0.5),
                layers.Dense(8, activation="relu"),
                layers.BatchNormalization(),
                layers.Dense(NUM_CLASSES, dtype="float32"),
            ]
        )


def create(collective: Collective, workload: Small, **settings: Any) -> Job:
    optimizer = OptimizerConfig(name="adam", lr=0.01, ema=settings.pop("ema", 0.0))
    values: dict[str, Any] = {"global_batch_size": 16, "steps": STEPS, "check_replicas_every": EVERY}
    values |= {"checkpoint_every": 0, "eval_every_epochs": 0, **settings}
    job = create_job(workload, Config(optimizer=optimizer, **values), collective, num_threads=1)
    broadcast_variables(job.step.variables, collective)
    return job


class Flip:
    """Flips a bit of a variable on one rank after a step, as a faulty memory does."""

    needs_weights = True
    needs_pause = True

    def __init__(self, variable: keras.Variable, *, after: int, is_here: bool) -> None:
        self._variable, self._after, self._is_here = variable, after, is_here

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return step == self._after

    def act(self, step: int, batch: Any, report: Any) -> None:
        if self._is_here:
            flip_bit(self._variable, bit=4)  # more than the next updates round off


def flip_bit(variable: keras.Variable, bit: int = 0) -> None:
    """Of the last value's lowest byte, the lowest bit."""
    values = np.array(tf.convert_to_tensor(variable.value))
    values.reshape(-1)[-1:].view(np.uint8)[0] ^= 1 << bit
    variable.assign(tf.constant(values))


def run(job: Job, *others: Any) -> int:
    """Train with checks; the steps done."""
    session = RunSession(job.config, job.collective)
    step, _ = run_steps(job, session, [*others, CheckReplicas(job, session)])
    return step


def drift_of(collective: Collective, act: Callable[..., Any], *arguments: Any) -> str:
    """What all ranks say, alike."""
    with pytest.raises(ReplicasDifferError) as caught:
        act(*arguments)
    traceback.clear_frames(caught.tb)  # closes the iterator of a job's batches, so that it can train again
    assert caught.value.reach == "run"
    assert len(set(all_gather_object(collective, str(caught.value), name="drift"))) == 1
    return str(caught.value)


@on_ranks(3)
def test_a_flipped_bit_is_found_with_its_variable_and_rank(collective: Any) -> None:
    world, job = collective.world, create(collective, Small())
    for odd in (0, 1):
        broadcast_variables(job.step.variables, collective)
        kind = "slots" if odd == 1 else "weights"
        name = [name for name in job.step.named_variables if name.startswith(kind)][-1]
        flip = Flip(job.step.named_variables[name], after=5, is_here=world.rank == odd)
        collective.world = replace(world, node=f"node{world.rank}")
        try:
            message = drift_of(collective, run, job, flip)
        finally:
            collective.world = world
        assert "at step 8 (at step 4 they were equal): " in message
        assert f"rank {odd} on node{odd} " in message
        assert name in message
        others = [rank for rank in range(3) if rank != odd]
        assert f"rank {odd} on node{odd} differs from ranks {others[0]}, {others[1]} in " in message


@on_ranks(2)
def test_one_bit_of_any_variable_is_enough(collective: Collective) -> None:
    job = create(collective, Small(), precision="mixed_float16", ema=0.9)
    variables = job.step.named_variables
    assert {name.split("/")[0] for name in variables} == {"weights", "slots", "averages", "loss_scale"}
    for number, (name, variable) in enumerate(variables.items()):
        if collective.world.rank == number % 2:
            flip_bit(variable, bit=number % 8)
        message = drift_of(collective, ReplicaGuard(variables, collective).check, 0)
        assert re.search(rf"differ from each other in {re.escape(name)}\.", message)
        if collective.world.rank == number % 2:
            flip_bit(variable, bit=number % 8)
    ReplicaGuard(variables, collective).check(0)


SETTINGS: list[Any] = [
    pytest.param({"ema": 0.9}, marks=pytest.mark.slow),
    pytest.param({"precision": "mixed_float16", "accumulate": 2}, marks=pytest.mark.slow),
    {"precision": "float64", "global_batch_size": 4},  # not the same number on each of three ranks
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@on_ranks(3, slow=[2])
def test_an_undisturbed_run_is_left_alone(collective: Collective, settings: dict[str, Any]) -> None:
    job = create(collective, Busy(), check_replicas_every=1, **settings)
    assert run(job) == STEPS
    seeds = [v for v in job.step.model.non_trainable_variables if v.name == "seed_generator_state"]
    assert len(seeds) == 2
    assert not {id(v) for v in seeds} & {id(v) for v in job.step.variables}


@on_ranks(2)
def test_replicas_are_checked_before_a_save_unless_disabled(collective: Collective) -> None:
    def flip_of(job: Job) -> Flip:
        return Flip(job.step.variables[0], after=5, is_here=collective.world.rank == 1)

    job = create(collective, Small(), check_replicas_every=1000, checkpoint_every=7)
    assert "at step 7: " in drift_of(collective, run, job, flip_of(job))
    broadcast_variables(job.step.variables, collective)
    unchecked = replace(job, config=replace(job.config, check_replicas_every=0))
    assert run(unchecked, flip_of(job)) == STEPS


def test_a_drifted_run_exits_with_5_and_keeps_equal_checkpoints(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--workload", f"{WORKLOADS}:LineThatDrifts", "--global_batch_size", "6", "--epochs", "6"]
    arguments += ["--checkpoint_every", "3", "--check_replicas_every", "5", "--out", str(out)]
    finished = run_ringtrain(arguments, launcher="mpirun", timeout=60)
    assert finished.rc == 5
    [message] = error_lines(finished)
    assert "at step 9 (at step 6 they were equal): rank 0 on " in message
    assert "weights/" in message
    assert "Traceback" not in finished.stderr + finished.stdout
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-000000003", "step-000000006"]
    end = events(out)[-1]
    assert (end["event"], end["exit_code"]) == ("end", 5)
