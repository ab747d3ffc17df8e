"""The learning rate as a function of the samples seen."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ringtrain.config import OptimizerConfig
from ringtrain.step.schedule import LearningRate

EPOCH = 1000


def rate(*, batch_ratio: float = 4.0, epochs: int = 10, **settings: Any) -> LearningRate:
    return LearningRate(
        optimizer=OptimizerConfig(lr=0.1, **settings),
        batch_ratio=batch_ratio,
        samples_per_epoch=EPOCH,
        total_samples=epochs * EPOCH,
    )


@pytest.mark.parametrize(("lr_scale", "peak"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_rate_grows_with_the_batch_as_asked(lr_scale: str, peak: float) -> None:
    assert [rate(lr_scale=lr_scale)(samples) for samples in (0, EPOCH, 20 * EPOCH)] == pytest.approx([peak] * 3)


def test_warm_up_rises_linearly_from_the_unscaled_rate() -> None:
    warm = rate(lr_scale="linear", warmup_epochs=2.0)
    assert [warm(n * EPOCH // 2) for n in (0, 1, 2, 4, 6)] == pytest.approx([0.1, 0.175, 0.25, 0.4, 0.4])


def test_warm_up_without_scaling_rises_from_zero() -> None:
    warm = rate(warmup_epochs=2.0)
    assert [warm(n * EPOCH) for n in (0, 1, 2, 3)] == pytest.approx([0.0, 0.05, 0.1, 0.1])


def test_exponential_decay_is_a_staircase_of_epochs() -> None:
    stairs = rate(schedule="exponential", decay_rate=0.5, decay_epochs=2.0)
    samples = [0, 2 * EPOCH - 1, 2 * EPOCH, 4 * EPOCH - 1, 4 * EPOCH]
    assert [stairs(n) for n in samples] == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025])


def test_cosine_reaches_zero_at_the_end_of_the_run() -> None:
    cosine = rate(schedule="cosine")
    assert [cosine(n * EPOCH) for n in (0, 5, 10, 11)] == pytest.approx([0.1, 0.05, 0.0, 0.0], abs=1e-15)
    assert cosine(5 * EPOCH // 2) == pytest.approx(0.05 * (1 + math.cos(math.pi / 4)))


def test_cosine_begins_after_the_warm_up() -> None:
    cosine = rate(schedule="cosine", warmup_epochs=2.0, lr_scale="linear")
    assert [cosine(n * EPOCH) for n in (0, 2, 6, 10)] == pytest.approx([0.1, 0.4, 0.2, 0.0], abs=1e-15)


def test_warm_up_and_linear_decay_make_a_triangle() -> None:
    triangle = rate(schedule="linear", warmup_epochs=2.0)
    assert [triangle(n * EPOCH) for n in (0, 1, 2, 4, 6, 10, 11)] == pytest.approx([0, 0.05, 0.1, 0.075, 0.05, 0, 0])


def test_polynomial_decay_is_of_power_two() -> None:
    polynomial = rate(schedule="polynomial", warmup_epochs=2.0)
    assert [polynomial(n * EPOCH) for n in (1, 2, 6, 10)] == pytest.approx([0.05, 0.1, 0.025, 0.0])


def test_linear_decay_begins_at_the_peak() -> None:
    linear = rate(schedule="linear", lr_scale="linear")
    assert [linear(n * EPOCH) for n in (0, 5, 10)] == pytest.approx([0.4, 0.2, 0.0])


@pytest.mark.parametrize("schedule", ["constant", "exponential", "cosine", "linear", "polynomial"])
def test_a_run_that_is_all_warm_up_has_a_rate(schedule: str) -> None:
    values = [rate(schedule=schedule, warmup_epochs=10.0)(n * EPOCH) for n in range(12)]
    assert all(math.isfinite(value) and value >= 0 for value in values)
