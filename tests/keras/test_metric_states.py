"""The value of a metric over all ranks is that of one process, whatever its state is."""

import inspect
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import ringtrain.keras as hvd
from ringtrain.collectives import Collective
from ringtrain.collectives.metric_states import is_sum_by_keras, merging_of, trace_merging
from ringtrain.errors import UsageError
from tests.keras.metrics import (
    LargestError,
    LastError,
    MeanOfOwn,
    MergedLargestError,
    SmallestError,
    SumThatBeginsAtOne,
)
from tests.world.group import on_ranks
from tests.world.running import events

SAMPLES, FEATURES, BATCH_SIZE = 48, 5, 4
NEEDED_ARGUMENTS: dict[str, dict[str, Any]] = {
    "BinaryIoU": {},
    "IoU": {"num_classes": 2, "target_class_ids": [0]},
    "MeanIoU": {"num_classes": 2},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 3},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}


def is_metric(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, keras.metrics.Metric) and value is not keras.metrics.Metric


KERAS_METRICS = sorted(name for name, value in vars(keras.metrics).items() if is_metric(value))


@pytest.mark.parametrize("name", KERAS_METRICS)
def test_all_metrics_of_keras_are_sums(name: str) -> None:
    """Ringtrain adds their states without a trace; here a trace shows that this is right."""
    random = np.random.default_rng(0)
    predictions = random.random((12, 3)).astype("float32")
    labels: Any = (random.random((12, 3)) > 0.5).astype("float32")
    if name.startswith("Sparse"):
        labels = random.integers(0, 3, 12)
    arguments = (predictions,) if name in ("Mean", "Sum") else (labels, predictions)
    metric = getattr(keras.metrics, name)(**NEEDED_ARGUMENTS.get(name, {}))
    metric.update_state(*arguments)
    assert is_sum_by_keras(metric)
    assert set(trace_merging(metric, *arguments).reductions or ()) == {"sum"}


@pytest.mark.parametrize(
    ("metric_class", "reductions", "reason"),
    [
        (LargestError, ("max",), ""),
        (SmallestError, ("min",), ""),
        (MeanOfOwn, ("sum", "sum"), ""),
        (LastError, None, "'last_error/largest' is no sum, maximum or minimum"),
        (SumThatBeginsAtOne, None, "'sum_from_one/largest' is a sum that does not begin at 0"),
    ],
)
def test_a_trace_shows_how_states_merge(metric_class: Any, reductions: Any, reason: str) -> None:
    merging = trace_merging(metric_class(), np.ones((4, 1), "float32"), np.ones((4, 1), "float32"))
    assert merging.reductions == reductions
    assert reason in merging.reason
    assert bool(merging.reason) == bool(reason)


def test_a_metric_that_cannot_be_traced_is_unmergeable() -> None:
    class NumPyError(LargestError):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.largest.assign(np.max(y_true.numpy()))

    metric = NumPyError()
    trace_merging(metric, keras.ops.ones((4, 1)), keras.ops.ones((4, 1)))
    assert "cannot be traced: " in merging_of(metric).reason


def make_metrics() -> list[keras.metrics.Metric]:
    return [
        keras.metrics.AUC(num_thresholds=21, name="auc"),
        keras.metrics.RootMeanSquaredError(name="rmse"),
        keras.metrics.F1Score(threshold=0.5, name="f1"),
        LargestError(),
        SmallestError(),
        MergedLargestError(),
        MeanOfOwn(),
    ]


def make_samples(samples: int = SAMPLES) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x, y and weights; the first samples have small weights."""
    random = np.random.default_rng(1)
    x = random.normal(size=(samples, FEATURES)).astype("float32")
    y = (random.random((samples, 1)) > 0.5).astype("float32")
    weights = random.uniform(0, 3, samples).astype("float32")
    weights[: samples // 2] *= 0.1
    return x, y, weights


def make_model(metrics: list[Any], weighted_metrics: list[Any]) -> keras.Model:
    """A model that does not change: its learning rate is 0."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, "sigmoid")])
    optimizer = keras.optimizers.SGD(0.0)
    if hvd.is_initialized():
        optimizer = hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, "mse", metrics=metrics, weighted_metrics=weighted_metrics)
    return model


def expected_values(samples: tuple[np.ndarray, np.ndarray, np.ndarray]) -> dict[str, float]:
    """Return the values of one process, by plain Keras on all samples."""
    model = make_model(make_metrics(), ["mae"])
    x, y, weights = samples
    expected = {}
    for metric in make_metrics():
        metric.reset_state()
        metric.update_state(y, model(x))
        expected[metric.name] = float(np.squeeze(metric.result()))
    weighted = keras.metrics.MeanAbsoluteError()
    weighted.update_state(y, model(x), weights)
    expected["mae"] = float(weighted.result())
    del expected["f1"]  # a vector of one value for each class, which logs do not average
    return expected


def local_part(samples: tuple[np.ndarray, ...], collective: Collective) -> tuple[np.ndarray, ...]:
    count = len(samples[0]) // collective.world.size
    start = collective.world.rank * count
    return tuple(array[start : start + count] for array in samples)


@on_ranks(1, 2, 3)
def test_averaged_logs_are_those_of_one_process(collective: Collective) -> None:
    hvd.init()
    train = make_samples()
    validation = make_samples(24)
    model = make_model([*make_metrics(), LastError()], ["mae"])
    x, y, weights = local_part(train, collective)
    logs = model.fit(
        x,
        y,
        sample_weight=weights,
        batch_size=BATCH_SIZE,
        validation_data=local_part(validation, collective),
        verbose=0,
        callbacks=[hvd.callbacks.MetricAverageCallback()],
    ).history
    for prefix, samples in (("", train), ("val_", validation)):
        for name, value in expected_values(samples).items():
            if name == "merged_error" and collective.world.size == 1:
                continue  # its result is a variable, which plain Keras logs after the validation
            assert logs[f"{prefix}{name}"] == [pytest.approx(value, rel=1e-5)], name
    # The value of the last batch is no value over all ranks.
    assert ("last_error" in logs) == (collective.world.size == 1)


@on_ranks(1, 2, 3)
def test_the_lines_of_a_kept_fit_are_those_of_one_process(collective: Collective, directory: str) -> None:
    hvd.init()
    train = make_samples()
    validation = make_samples(24)
    model = make_model([*make_metrics(), LastError()], ["mae"])
    x, y, weights = local_part(train, collective)
    model.fit(
        x,
        y,
        sample_weight=weights,
        batch_size=BATCH_SIZE,
        shuffle=False,
        validation_data=local_part(validation, collective),
        verbose=0,
        callbacks=[hvd.callbacks.Run(directory, log_every=len(x) // BATCH_SIZE, best_metric="largest_error")],
    )
    if not collective.world.is_rank0:
        return
    lines = {"train": train, "eval": validation}
    for event, samples in lines.items():
        [line] = events(Path(directory), event)
        for name, value in expected_values(samples).items():
            assert line[name] == pytest.approx(value, rel=1e-5), (event, name)
        assert ("last_error" in line) == (collective.world.size == 1)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@on_ranks(2)
def test_ranks_with_other_validation_are_refused_by_name(collective: Collective) -> None:
    hvd.init()
    model = make_model([], ["mae"])
    x, y, weights = local_part(make_samples(), collective)
    validation = (x, y, weights) if collective.world.is_rank0 else None
    with pytest.raises(UsageError, match=r"rank 0 has loss, mae, val_loss, val_mae, rank 1 has loss, mae"):
        model.fit(
            x,
            y,
            sample_weight=weights,
            validation_data=validation,
            verbose=0,
            callbacks=[hvd.callbacks.MetricAverageCallback()],
        )


@on_ranks(2)
def test_ranks_with_other_metrics_of_one_name_are_refused(collective: Collective) -> None:
    hvd.init()
    bins = 11 + 10 * collective.world.rank
    model = make_model([keras.metrics.AUC(num_thresholds=bins, name="auc")], [])
    x, y, _ = local_part(make_samples(), collective)
    with pytest.raises(UsageError, match="'auc' has another state on rank 1 than on rank 0"):
        model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])


@on_ranks(2)
def test_a_value_of_no_metric_is_the_mean_over_samples(collective: Collective) -> None:
    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["own"] = float(1 + collective.world.rank)

    hvd.init()
    model = make_model([], [])
    x, y, _ = make_samples(12)
    part = slice(0, 3) if collective.world.is_rank0 else slice(3, 12)
    callbacks = [Own(), hvd.callbacks.MetricAverageCallback()]
    logs = model.fit(x[part], y[part], batch_size=12, verbose=0, callbacks=callbacks).history
    assert logs["own"] == [pytest.approx((3 * 1 + 9 * 2) / 12)]
