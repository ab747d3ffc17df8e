"""What ``callbacks.Run`` promises of several ``fit``s in one process, each told to stop or done."""

import functools
import os
import random as random_module
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain.keras as hvd
from ringtrain.collectives import Collective
from ringtrain.errors import UsageError
from ringtrain.keras.exchange import Exchange
from ringtrain.run.checkpoint import read_checkpoint
from ringtrain.run.store import find_checkpoint
from ringtrain.runtime import activity
from ringtrain.runtime.activity import Phase
from tests.keras.kept import generate
from tests.keras.training import CLASSES, FEATURES
from tests.world.group import SOCKET_DIRECTORY, on_ranks
from tests.world.running import events

BATCHES, BATCH_SIZE = 4, 8
FIGURES = (5.0, 3.0, 4.0, 4.0)  # of the epochs, for callbacks that count


class Figure(keras.callbacks.Callback):
    """A value that others monitor; and what all callbacks are told of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["figure"] = FIGURES[epoch]
        self.logs.append(dict(logs))


class Stop(keras.callbacks.Callback):
    """Asks to stop in a step of this process, and waits until that is heard."""

    def __init__(self, step: int, ask: Callable[[], object]) -> None:
        super().__init__()
        self._steps_left, self._ask = step, ask

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps_left -= 1
        if self._steps_left == 0:
            self._ask()
            kept = hvd.callbacks.Run.current
            while kept and not kept._session.requests.is_pending:
                time.sleep(0.01)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Fitted(NamedTuple):
    code: int | None  # with which the script ended
    model: keras.Model
    logs: list[dict[str, float]]

    def bits(self) -> list[bytes]:
        variables = [*self.model.variables, *self.model.optimizer.variables]
        return [np.asarray(variable.numpy()).tobytes() for variable in variables]


def fit(
    out: str,
    kind: str = "dataset",
    *,
    stop_at: int = 0,
    ask: Callable[[], object] = terminate,
    epochs: int = len(FIGURES),
    others: Sequence[keras.callbacks.Callback] = (),
    is_new_process: bool = False,
    change: Callable[[np.ndarray, np.ndarray], tuple[Any, Any]] = lambda x, y: (x, y),
    **settings: Any,
) -> Fitted:
    """Fit a model as a script does that has just been started."""
    hvd.init()
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy("mixed_float16" if kind == "float16" else "float32")
    layers = [keras.layers.Dropout(0.3), keras.layers.Dense(CLASSES)]
    model = keras.Sequential([*([] if kind == "unbuilt" else [keras.Input((FEATURES,))]), *layers])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05))
    if kind == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0, dynamic_growth_steps=3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=3 if kind == "three at once" else 1)
    random = np.random.default_rng([7, hvd.rank()])
    x = random.normal(size=(BATCHES * BATCH_SIZE, FEATURES)).astype(np.float32)
    x, y = change(x, (np.abs(x).sum(axis=1) * 3 % CLASSES).astype(np.int32))
    if is_new_process:  # with other states of the generators than the run began with
        random_module.seed(stop_at + 100)
        np.random.seed(stop_at + 100)
    data: Any = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(20, seed=5).batch(BATCH_SIZE)
    if kind == "unknown":
        data = data.filter(lambda x, y: True)
    if kind == "generator":
        data = generate(x, y)
    if kind.startswith("shuffled"):
        by_kind: dict[str, Callable[[Any], object]] = {
            "shuffled by the user": np.random.shuffle,
            "shuffled twice": random_module.shuffle,  # by the user, and by Keras before
        }
        data = Slices(x, y, shuffle=by_kind.get(kind), workers=2 if "threads" in kind else 1)
    figure = Figure()
    run = hvd.callbacks.Run(out, **{"log_every": 1, "checkpoint_every": 0, **settings})
    average = [hvd.callbacks.MetricAverageCallback()] if kind == "unknown" else []
    callbacks = [figure, *others, *average, *([Stop(stop_at, ask)] if stop_at else []), run]
    steps = BATCHES if kind == "generator" else None
    given: dict[str, Any] = {"shuffle": False} if kind == "shuffled by the user" else {}  # Keras' default is True
    given |= {"epochs": epochs, "steps_per_epoch": steps}
    if not kind.startswith("shuffled"):
        given["validation_data"] = (x[:20], y[:20])
    code = None
    try:
        model.fit(data, **given, callbacks=callbacks, verbose=0)
    except SystemExit as end:
        code = int(end.code or 0)
    return Fitted(code, model, figure.logs)


class Whole(NamedTuple):
    """An uninterrupted fit."""

    out: Path
    bits: list[bytes]
    logs: list[dict[str, float]]


@functools.cache
def fit_whole(kind: str = "dataset") -> Whole:
    """Fit without an interruption, once in each process."""
    out = Path(os.environ[SOCKET_DIRECTORY], f"whole {kind}")  # removed when the ranks end
    fitted = fit(str(out), kind, best_metric="accuracy", best_direction="max", log_every=3)
    assert fitted.code is None
    return Whole(out, fitted.bits(), fitted.logs)


class Slices(keras.utils.PyDataset):
    """Batches of arrays; their order is shuffled by Keras, or by the user after each epoch."""

    def __init__(self, x: np.ndarray, y: np.ndarray, *, shuffle: Callable[[Any], object] | None, workers: int) -> None:
        super().__init__(workers=workers)
        self._x, self._y, self._shuffle, self._order = x, y, shuffle, np.arange(BATCHES)

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(BATCH_SIZE * self._order[number], BATCH_SIZE * (self._order[number] + 1))
        return self._x[part], self._y[part]

    def on_epoch_end(self) -> None:
        if self._shuffle:
            self._shuffle(self._order)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.mark.parametrize(
    "kind",
    [
        "unknown",
        "unbuilt",
        "shuffled twice",
        "three at once",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("float16", "generator")),
    ],
)
@on_ranks(1)
def test_a_stopped_fit_resumes_bit_for_bit(collective: Collective, kind: str, directory: str) -> None:
    """With three steps at once, the third call has the first batches of the second epoch."""
    calls, step = (3, BATCHES + 3) if kind == "three at once" else (BATCHES + 2, BATCHES + 2)
    whole, out = fit_whole(kind), f"{directory}/run"
    assert fit(out, kind, stop_at=calls).code == 75
    rest = fit(out, kind)
    assert (events(Path(out), "start")[-1]["first_step"], rest.code) == (step, None)
    assert rest.bits() == whole.bits
    assert rest.logs == whole.logs[1:]
    assert kind != "float16" or float(rest.model.optimizer.dynamic_scale) > 8.0


MID_EPOCH, END_OF_EPOCH = BATCHES + 2, 3 * BATCHES


@pytest.mark.parametrize(
    ("kind", "stop_at"),
    [
        ("shuffled by threads", MID_EPOCH),
        ("shuffled by the user", END_OF_EPOCH),
        pytest.param("shuffled by threads", END_OF_EPOCH, marks=pytest.mark.slow),
    ],
)
@on_ranks(1)
def test_a_fit_resumes_the_order_of_python_and_numpy_shuffles(
    collective: Collective, kind: str, stop_at: int, directory: str
) -> None:
    """If Keras shuffles, also in a process with other states of the generators."""
    whole, out = fit_whole(kind), f"{directory}/run"
    assert fit(out, kind, stop_at=stop_at).code == 75
    rest = fit(out, kind, is_new_process=kind != "shuffled by the user")
    assert (events(Path(out), "start")[-1]["first_step"], rest.code) == (stop_at, None)
    assert rest.logs == whole.logs[stop_at // BATCHES :]
    assert rest.bits() == whole.bits


@on_ranks(1)
def test_a_fit_resumes_on_several_cores_after_one(collective: Collective, directory: str) -> None:
    """tf.data tunes the pipeline on several alone, and gives it other parts then."""
    whole, out = fit_whole(), f"{directory}/run"
    for cores, stop_at in (({0}, BATCHES + 2), ({0, 1}, 0)):
        with mock.patch("os.sched_getaffinity", return_value=cores):
            rest = fit(out, stop_at=stop_at)
    assert rest.code is None
    assert rest.bits() == whole.bits


@on_ranks(1, slow=[2], timeout=120)
def test_an_epoch_of_unknown_length_saved_at_its_end_resumes(collective: Collective, directory: str) -> None:
    whole, out = fit_whole("unknown"), f"{directory}/run"
    heard_later = collective.world.size > 1  # by the next step, in which the ranks tell each other
    assert fit(out, "unknown", stop_at=2 * BATCHES - heard_later).code == 75
    rest = fit(out, "unknown")
    assert (events(Path(out), "start")[-1]["first_step"], rest.code) == (2 * BATCHES, None)
    assert rest.logs == whole.logs[1:]
    assert rest.bits() == whole.bits


@on_ranks(1)
def test_the_state_of_callbacks_is_resumed(collective: Collective, directory: str) -> None:
    """The best figure is the second epoch's; the run is stopped in the fourth."""

    for stop_at in (3 * BATCHES + 1, 0):
        plateau = keras.callbacks.ReduceLROnPlateau("figure", mode="min", factor=0.5, patience=2)
        best = keras.callbacks.ModelCheckpoint(
            f"{directory}/{{epoch}}.keras", "figure", mode="min", save_best_only=True
        )
        model = fit(f"{directory}/run", others=[plateau, best], stop_at=stop_at).model
    assert float(model.optimizer.learning_rate) == pytest.approx(0.025)
    assert (plateau.best, best.best) == (3.0, 3.0)
    assert sorted(path.name for path in Path(directory).glob("*.keras")) == ["1.keras", "2.keras"]


@on_ranks(1)
def test_the_best_checkpoint_is_that_of_the_metric(collective: Collective, directory: str) -> None:
    out = fit_whole().out
    accuracies = {event["step"]: event["accuracy"] for event in events(out, "eval")}
    assert read_checkpoint(find_checkpoint(out)).step == max(accuracies, key=lambda step: accuracies[step])
    assert fit(f"{directory}/other", best_metric="auc", epochs=1).code == 2


class Evaluate(keras.callbacks.Callback):
    """Evaluates on other samples, after each epoch and within one."""

    def _evaluate(self) -> None:
        random = np.random.default_rng(1)
        x, y = random.normal(size=(40, FEATURES)).astype(np.float32), random.integers(CLASSES, size=40)
        self.model.evaluate(x, y, batch_size=20, verbose=0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self._evaluate()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._evaluate()


@on_ranks(1)
def test_an_evaluation_in_a_callback_changes_no_logged_metric(collective: Collective, directory: str) -> None:
    logged, out = [], Path(directory, "run")
    assert fit(str(out), others=[Evaluate()], log_every=3).code is None
    for run in (out, fit_whole().out):
        of_run = [event for kind in ("train", "eval") for event in events(run, kind)]
        logged.append([(event["step"], event["loss"], event["accuracy"], event.get("samples")) for event in of_run])
    assert logged[0] == logged[1]


@on_ranks(1)
def test_the_file_stop_and_the_limit_of_time_end_it(collective: Collective, directory: str) -> None:
    out = Path(directory, "run")
    asks: dict[str, Callable[[], object]] = {"file": (out / "stop").touch, "time": lambda: None}
    for cause, ask in asks.items():
        assert fit(str(out), stop_at=1, ask=ask, max_hours=1e-6 if cause == "time" else None).code == 75
        end = events(out, "end")[-1]
        assert (end["status"], end["exit_code"], end["stopped_by"]) == ("preempted", 75, cause)
        assert [rank["peak_memory_mib"] > 100 for rank in end["ranks"]] == [True]
        assert not (out / "stop").exists(), "it would end the next run, too"
    assert fit(str(out), epochs=1).code is None
    assert [event["first_step"] for event in events(out, "start")] == [0, 1, 2]


@on_ranks(2)
def test_a_loss_that_is_not_finite_names_its_rank_and_step(collective: Collective, directory: str) -> None:
    """The sum of the gradients makes the weights of all ranks so, long before the next line of the log."""

    def spoil(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x[2 * BATCH_SIZE :] *= np.nan if hvd.rank() == 1 else 1
        return x, y

    shuffled = mock.patch.object(tf.data.Dataset, "shuffle", lambda dataset, *args, **kwargs: dataset)
    with shuffled:
        assert fit(f"{directory}/run", change=spoil, log_every=4).code == 4
    if hvd.rank() == 0:
        [end] = events(Path(directory, "run"), "end")
        assert end["message"].startswith("the loss of rank 1 is not finite, in step 3. Nothing is saved.")


class FlipBit(keras.callbacks.Callback):
    """Changes one bit of one weight of rank 1 after a step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1 and hvd.rank() == 1:
            kernel = self.model.layers[-1].kernel
            values = kernel.numpy()
            values.view(np.uint8).reshape(-1)[0] ^= 1
            kernel.assign(values)


@pytest.mark.parametrize("settings", [{"check_replicas_every": 3}, {"checkpoint_every": 3}], ids=["check", "save"])
@on_ranks(2)
def test_a_drifted_replica_is_named_mid_epoch_and_not_saved(
    collective: Collective, settings: dict[str, Any], directory: str
) -> None:
    assert fit(f"{directory}/run", others=[FlipBit()], **settings).code == 5
    if hvd.rank() == 0:
        [end] = events(Path(directory, "run"), "end")
        assert re.match(r"the ranks hold different values at step 3: .*kernel", end["message"])
        assert not events(Path(directory, "run"), "checkpoint")


@on_ranks(2)
def test_the_phase_distinguishes_waiting_for_data_and_for_ranks(collective: Collective, directory: str) -> None:
    """Keras reads the data within the step, but for the first three, so that both ranks are in the same one."""
    reduces, seen, calls = Path(directory, "reduces"), list[bool](), []

    def doing() -> Phase:
        assert hvd.callbacks.Run.current is not None
        return hvd.callbacks.Run.current.refine(activity.current()[0]).doing

    def wait_until(condition: Callable[[], bool]) -> bool:
        end = time.monotonic() + 20
        while not (is_so := condition()) and time.monotonic() < end:
            time.sleep(0.01)
        return is_so

    def wait(y: np.ndarray) -> np.ndarray:
        """Of rank 1, for the fourth batch, until rank 0 waits for it in the reduction."""
        calls.append(y)
        if hvd.rank() == 1 and len(calls) == 3 * BATCH_SIZE + 1:
            seen.append(wait_until(reduces.exists) and wait_until(lambda: doing() == Phase.GRADIENTS))
        return y

    def look() -> None:
        seen.append(wait_until(lambda: activity.current()[0].step == 4 and doing() == Phase.STEP))
        reduces.touch()

    looks = threading.Thread(target=look if hvd.rank() == 0 else lambda: None)
    looks.start()
    awaited = mock.patch.object(
        tf.data.Dataset,
        "shuffle",
        lambda dataset, *args, **kwargs: dataset.map(
            lambda x, y: (x, tf.ensure_shape(tf.numpy_function(wait, [y], tf.int32), []))
        ),
    )
    with awaited:
        assert fit(f"{directory}/run", epochs=1).code is None
    looks.join()
    assert seen == [True]


@on_ranks(2)
def test_the_watchdog_knows_of_callbacks_and_of_the_first_batch(collective: Collective, directory: str) -> None:
    phases: list[tuple[str, Phase]] = []

    def note(name: str) -> None:
        phases.append((name, activity.current()[0].doing))

    names = ["on_train_begin", "on_epoch_end", "on_train_end"]
    callback = keras.callbacks.LambdaCallback(**{name: lambda *_, name=name: note(name) for name in names})

    def look(*args: Any, plain: Any = generate) -> Any:
        note("first batch")
        yield from plain(*args)

    joins = mock.patch.object(Exchange, "join", side_effect=lambda **_: note("join"))
    with mock.patch(f"{__name__}.generate", look), joins:
        fit(f"{directory}/run", "generator", epochs=1, others=[callback])
    begin, *callbacks = names
    assert phases == [
        ("first batch", Phase.PREPARE),
        (begin, Phase.CALLBACKS),
        ("join", Phase.MEET),
        *((name, Phase.CALLBACKS) for name in callbacks),
    ]


@on_ranks(1)
def test_a_run_that_keeps_no_fit_is_refused(collective: Collective, directory: str) -> None:
    hvd.init()
    with pytest.raises(UsageError, match="out is 3; it must be a path"):
        hvd.callbacks.Run(3)  # type: ignore[arg-type]
    model, x = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), np.zeros((4, 1))
    run = hvd.callbacks.Run(f"{directory}/run")
    with pytest.raises(ValueError, match="compile"):
        model.fit(x, x, callbacks=[run])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    with pytest.raises(UsageError, match=r"callbacks.Run is a callback of fit\(\)"):
        model.evaluate(x, x, callbacks=[run])


@on_ranks(1)
def test_a_subclass_of_run_may_have_methods_of_its_own(collective: Collective, directory: str) -> None:
    seen = []

    class Noting(hvd.callbacks.Run):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)
            seen.append(epoch)

    hvd.init()
    model, x = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), np.zeros((4, 1))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    model.fit(x, x, epochs=2, verbose=0, callbacks=[Noting(f"{directory}/run")])
    assert seen == [0, 1]
    [end] = events(Path(directory, "run"), "end")
    assert end["status"] == "completed"


@on_ranks(1)
def test_the_resume_argument_of_a_fit_is_followed(collective: Collective, directory: str) -> None:
    out = Path(directory, "run")
    assert fit(str(out), resume="must", epochs=1).code == 2
    assert not (out / "metrics.jsonl").exists()
    short = fit(str(out), epochs=1)
    again = fit(str(out), resume="must", epochs=1)
    assert (again.code, again.logs) == (None, [])
    for mine, its in zip(again.model.weights, short.model.weights, strict=True):
        assert np.array_equal(mine.numpy(), its.numpy())
    fit(str(out), resume="must", epochs=2)
    assert [event["first_step"] for event in events(out, "start")] == [0, BATCHES]
    fit(str(out), resume="never", epochs=1)
    [beside] = [path for path in out.parent.iterdir() if path != out]
    assert [event["step"] for event in events(beside, "train")] == [*range(1, BATCHES + 1)]
    assert len(events(out, "start")) == 2


# --- Several steps in a call ---


class Late(keras.Model):
    """Creates a metric in its first step."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, [variable.value for variable in self.trainable_variables])
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        if not hasattr(self, "late"):
            self.late = keras.metrics.Mean("late")
        self.late.update_state(loss)
        return {"late": self.late.result()}


class Eager(keras.Model):
    """Needs values, so that Keras cannot create its metrics before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(CLASSES)

    def call(self, x: Any) -> Any:
        return self.dense(x * (1.0 if float(x[0, 0]) > -99 else 2.0))


def make_several(kind: str) -> keras.Model:
    """A compiled model that trains three steps in a call."""
    if kind == "eager":
        model = Eager()
        model(np.zeros((BATCH_SIZE, FEATURES), np.float32))
    else:
        inputs = keras.Input((FEATURES,))
        model = (Late if kind == "late" else keras.Model)(inputs, keras.layers.Dense(CLASSES)(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = None if kind == "late" else ["accuracy"]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05))
    model.compile(optimizer, loss, metrics=metrics, steps_per_execution=3, run_eagerly=kind == "eager")
    return model


def fit_several(out: str, kind: str, *, stop_at: int = 0) -> Fitted:
    """Fit two epochs of 22 batches, of which a call trains three."""
    num_batches = 22
    hvd.init()
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = make_several(kind)
    random = np.random.default_rng([7, hvd.rank()])
    x = random.normal(size=(num_batches * BATCH_SIZE, FEATURES)).astype(np.float32)
    y = (np.abs(x).sum(axis=1) * 3 % CLASSES).astype(np.int32)
    data: Any = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    if kind == "generator":  # its iterator has no state to be saved
        data = generate(x, y)
    figure = Figure()
    callbacks = [figure, *([Stop(stop_at, terminate)] if stop_at else [])]
    callbacks.append(hvd.callbacks.Run(out, log_every=7, checkpoint_every=0))
    steps = num_batches if kind == "generator" else None
    code = None
    try:
        model.fit(data, epochs=2, steps_per_epoch=steps, callbacks=callbacks, verbose=0)
    except SystemExit as end:
        code = int(end.code or 0)
    return Fitted(code, model, figure.logs)


def logged_values(out: str) -> dict[int, dict[str, float]]:
    """The values of each logged step, without times."""
    times = ("time", "examples_per_sec", "sec_per_step")
    values = {}
    for event in events(Path(out), "train"):
        values[event["step"]] = {name: value for name, value in event.items() if name not in times}
    return values


@pytest.mark.parametrize("kind", ["late", "eager", "plain", "generator"])
@pytest.mark.parametrize("stop_at", [2, 4, 11])
@on_ranks(1)
def test_several_steps_in_a_call_resume_bit_for_bit(
    collective: Collective, kind: str, stop_at: int, directory: str
) -> None:
    """Sums of an epoch are added in the order of an undisturbed fit; a generator goes on with its next batch."""
    whole = fit_several(f"{directory}/whole", kind)
    assert fit_several(f"{directory}/run", kind, stop_at=stop_at).code == 75
    rest = fit_several(f"{directory}/run", kind)
    assert (rest.code, rest.bits()) == (None, whole.bits())
    assert rest.logs == whole.logs[-len(rest.logs) :]
    assert logged_values(f"{directory}/run") == logged_values(f"{directory}/whole")
