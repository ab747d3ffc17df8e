"""Several steps in one call train, report and stop as single steps do, bit for bit."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.collectives import Collective
from ringtrain.config import Config, OptimizerConfig
from ringtrain.data.indexed import from_grain
from ringtrain.data.order import SampleOrder
from ringtrain.data.sources import ArraySource, from_arrays
from ringtrain.errors import DataError, DivergedError
from ringtrain.runtime import activity
from ringtrain.runtime.activity import Note, Phase
from ringtrain.step.report import FACTS
from ringtrain.training import calls, loop
from ringtrain.training.actions import Action, Ending
from ringtrain.training.job import create_job
from ringtrain.training.loop import run_steps
from ringtrain.training.session import RunSession
from ringtrain.workloads.base import Sources
from tests.world.conftest import RunRingtrain
from tests.world.group import on_ranks
from tests.world.test_datasets import PIPELINES
from tests.world.test_native import horovod_of
from tests.world.training import (
    NUM_CLASSES,
    NUM_FEATURES,
    Classification,
    assert_same_bits_on_all_ranks,
    batchnorm_model,
    bits_of,
    dense_samples,
    embedding_model,
    regularised_model,
    word_samples,
)

STEPS, GLOBAL_BATCH_SIZE = 13, 12  # 50 samples: the fifth step of an epoch has 2


def dropout_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential([keras.Input((NUM_FEATURES,)), layers.Dropout(0.4), layers.Dense(NUM_CLASSES)])


class Samples(Classification):
    def __init__(self, create: Callable[[], keras.Model], samples: ArraySource) -> None:
        super().__init__(create)
        self._samples = samples

    def create_sources(self, data_dir: Any, *, synthetic: bool) -> Sources:
        return Sources(self._samples, None)


WORKLOADS = {
    "regularised": lambda: Samples(regularised_model, dense_samples(50)),
    "dropout": lambda: Samples(dropout_model, dense_samples(50)),
    "batchnorm": lambda: Samples(batchnorm_model, dense_samples(50)),
    "embedding": lambda: Samples(embedding_model, word_samples(50)),
    "float32": lambda: Samples(regularised_model, dense_samples(50, "float32")),
}


class Every(Action):
    """Wants each nth step's weights."""

    def __init__(self, job: Any, session: RunSession, every: int) -> None:
        super().__init__(job, session)
        self._every, self.steps = every, list[int]()

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return step % self._every == 0

    def act(self, step: int, *_: object) -> None:
        self.steps.append(step)


def train(
    collective: Collective,
    workload: str,
    steps_per_call: int | str,
    *,
    in_groups: bool | None = None,
    steps: int = STEPS,
    **settings: Any,
) -> Any:
    """Return what each step has returned, the variables' bits at the end, and the lengths of the calls."""
    config = Config(
        global_batch_size=GLOBAL_BATCH_SIZE, steps=steps, steps_per_call=str(steps_per_call), seed=3, **settings
    )
    keras.utils.clear_session(free_memory=False)  # the same names in both runs
    keras.utils.set_random_seed(7)
    job = create_job(WORKLOADS[workload](), config, collective, num_threads=1, in_groups=in_groups)
    job.step.share_values(collective)
    session, rows, lengths = RunSession(config, collective), list[Any](), list[int]()
    right_train, right_call = loop.train_step, job.many_steps.__call__

    def note(step: int, returned: Any) -> None:
        row = np.array(returned)
        row[FACTS.index("communication_sec") - len(FACTS)] = 0
        rows.append((step, row.tobytes()))

    def train_one(job: Any, session: Any, step: int, batch: Any) -> Any:
        trained = right_train(job, session, step, batch)
        note(step, trained.returned)
        return trained

    def train_many(self: Any, first_step: int, learning_rates: Any, **more: Any) -> Any:
        lengths.append(len(learning_rates))
        trained = right_call(first_step, learning_rates, **more)
        for number, row in enumerate(trained[0], start=1):
            note(first_step + number, row)
        return trained

    every = Every(job, session, 9)
    with (
        mock.patch.multiple(loop, train_step=train_one),
        mock.patch.object(type(job.many_steps), "__call__", train_many),
    ):
        step, ending = run_steps(job, session, [every])
    assert (step, ending, every.steps[0]) == (steps, Ending.COMPLETED, 9)
    assert_same_bits_on_all_ranks(job.step.variables, collective)
    return rows, bits_of(list((job.step.named_variables | job.step.named_pieces).values())), lengths


@pytest.mark.parametrize(
    ("workload", "settings"),
    [
        ("dropout", {"optimizer": {"name": "adam", "ema": 0.9, "schedule": "cosine"}, "shard_optimizer": True}),
        ("batchnorm", {"accumulate": 2, "in_groups": True}),
        ("embedding", {"optimizer": {"name": "adam"}, "precision": "float64"}),
        ("float32", {"precision": "mixed_float16", "over": "horovod"}),
        ("augmented", {"jit_compile": "true"}),
    ],
)
@on_ranks(2)
def test_they_train_the_same_bits_as_single_steps(
    collective: Collective, workload: str, settings: dict[str, Any]
) -> None:
    over, in_groups = settings.pop("over", None), settings.pop("in_groups", None)
    optimizer = OptimizerConfig(**settings.pop("optimizer", {}))
    its = horovod_of(collective) if over and collective.world.size > 1 else collective
    single, many = (
        train(its, workload, count, in_groups=in_groups, optimizer=optimizer, **settings) for count in (1, 4)
    )
    assert many[:2] == single[:2]
    # The first step compiles; the action of step 9 and the short last steps of epochs (5, 10) end a call.
    assert (single[2], many[2]) == ([], [3, 4, 3])


@pytest.mark.slow
@on_ranks(1, 3)
def test_one_and_three_ranks_train_the_same_bits(collective: Collective) -> None:
    settings = {"optimizer": {"name": "adam", "ema": 0.9, "schedule": "cosine"}, "shard_optimizer": True}
    test_they_train_the_same_bits_as_single_steps.body(collective, "dropout", settings)


@on_ranks(2)
def test_auto_trains_many_steps_if_their_compilation_pays(collective: Collective) -> None:
    single = train(collective, "regularised", 1, steps=30)
    for saved, lengths in ((0.0, []), (1000.0, [3, 3, 4, 2, 2])):
        with mock.patch.multiple(calls, SAVED_SHARE=saved, SAVED_SECONDS=saved, CALL_SECONDS=1000.0):
            auto = train(collective, "regularised", "auto", steps=30)
        assert auto[:2] == single[:2]
        assert auto[2] == lengths


class Augmented(Samples):
    """Read by a pipeline, as ``augment`` runs ahead. Its labels are not looked at."""

    def augment(self, x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return x + tf.cast(keys % 7, x.dtype)[:, tf.newaxis] / 100, y

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.square(outputs), axis=1)

    def metrics(self, y: tf.Tensor, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {}


WORKLOADS["augmented"] = lambda: Augmented(regularised_model, dense_samples(50, "float32"))


class Fragile(Samples):
    """Its loss of one sample is not finite."""

    def __init__(self) -> None:
        samples = dense_samples(50, "float32")
        x = samples.x.numpy()
        x[17] = np.nan
        super().__init__(regularised_model, from_arrays(x, samples.y.numpy()))


WORKLOADS["fragile"] = Fragile


@on_ranks(2, slow=[1])
def test_a_nonfinite_step_ends_the_call(collective: Collective) -> None:
    def stop(count: int) -> str:
        with pytest.raises(DivergedError) as caught:
            train(collective, "fragile", count)
        return str(caught.value)

    assert stop(4) == stop(1)
    single, many = (train(collective, "fragile", count, on_nonfinite="skip") for count in (1, 4))
    assert many[:2] == single[:2]
    assert len(many[2]) > 3, "no call follows the step"


@on_ranks(2)
def test_a_request_to_stop_ends_the_call_after_its_first_step(collective: Collective) -> None:
    config = Config(global_batch_size=GLOBAL_BATCH_SIZE, steps=STEPS, steps_per_call="4")
    job = create_job(WORKLOADS["float32"](), config, collective, num_threads=1)
    session, lengths = RunSession(config, collective), list[int]()
    right_train = loop.train_many_steps

    def train_many(job: Any, session: Any, step: int, num_steps: int) -> Any:
        trained = right_train(job, session, step, num_steps)
        lengths.append(trained.step - step)
        return trained

    class AskRank1(Every):
        def act(self, step: int, *_: object) -> None:
            if collective.world.rank == 1:
                session.requests.reason = "SIGTERM"

    with mock.patch.object(loop, "train_many_steps", train_many):
        assert run_steps(job, session, [AskRank1(job, session, 2)]) == (3, Ending.PREEMPTED)
    assert lengths == [1]


class Slow(Augmented):
    """Reads a sample in 50 ms, and one of them not at all."""

    def __init__(self, bad: int) -> None:
        super().__init__(regularised_model, dense_samples(50))
        self._bad = bad

    def create_sources(self, data_dir: Any, *, synthetic: bool) -> Sources:
        return Sources(from_grain(SlowSamples(self._bad)), None)


class SlowSamples:
    def __init__(self, bad: int) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return 50

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        time.sleep(0.05)
        if number == self._bad:
            raise ValueError("is damaged")
        return np.full(NUM_FEATURES, number, np.float32), number % NUM_CLASSES


def run_slow(collective: Collective, bad: int) -> None:
    config = Config(global_batch_size=1, steps=12, steps_per_call="8")
    job = create_job(Slow(bad), config, collective, num_threads=1)
    try:
        run_steps(job, RunSession(config, collective), [])
    finally:
        assert job.many_steps.is_traced


@on_ranks(1)
def test_the_phase_within_a_call_is_known(collective: Collective) -> None:
    seen, has_ended = set[Note](), threading.Event()

    def look() -> None:
        while not has_ended.wait(0.005):
            seen.add(activity.current()[0])

    looking = threading.Thread(target=look)
    looking.start()
    try:
        run_slow(collective, bad=-1)
    finally:
        has_ended.set()
        looking.join()
    assert len({note.step for note in seen if note.doing is Phase.DATA and note.step > 5}) >= 4


@on_ranks(1)
def test_a_sample_that_cannot_be_read_within_a_call_is_named(collective: Collective) -> None:
    order = SampleOrder(num_samples=50, global_batch_size=1)
    bad = int(order.local_batch(6, rank=0, size=1).indices[0])
    with pytest.raises(DataError, match=f"sample {bad}, .*is damaged"):
        run_slow(collective, bad)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0", "steps_per_call is 0; it must be auto or a whole number from 1 to 2,147,483,647."),
        ("some", "steps_per_call is some; it must be auto or a whole number from 1 to 2,147,483,647."),
        ("23", "steps_per_call is 23; it must be auto, or from 1 to 22, the steps of an epoch."),
    ],
)
def test_an_invalid_number_of_steps_per_call_is_refused(
    value: str, message: str, run_ringtrain: RunRingtrain, tmp_path: Path
) -> None:
    finished = run_ringtrain(["--steps_per_call", value, "--global_batch_size", "64", "--out", str(tmp_path / "run")])
    assert finished.rc == 2
    assert message in finished.stderr


def test_a_stream_trains_single_steps_and_says_why(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    workload = ["--workload", f"{PIPELINES}:Whole", "--steps", "5", "--steps_per_call", "2"]
    finished = run_ringtrain([*workload, "--out", str(tmp_path / "run")])
    assert finished.rc == 0, finished.stderr
    why = "the samples of a step are known only after the step before it"
    assert f"--steps_per_call 2 trains one step per call: {why}." in finished.stdout
