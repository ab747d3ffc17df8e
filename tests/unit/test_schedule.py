"""The learning rate as a function of the samples seen."""

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


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"lr_scale": "linear", "warmup_epochs": 2.0}, {0: 0.1, 0.5: 0.175, 1: 0.25, 2: 0.4, 3: 0.4}),
        ({"warmup_epochs": 2.0}, {0: 0.0, 1: 0.05, 2: 0.1, 3: 0.1}),
        ({"schedule": "cosine", "warmup_epochs": 2.0, "lr_scale": "linear"}, {0: 0.1, 2: 0.4, 6: 0.2, 10: 0.0}),
        ({"schedule": "linear", "warmup_epochs": 2.0}, {0: 0, 1: 0.05, 2: 0.1, 4: 0.075, 6: 0.05, 10: 0, 11: 0}),
        ({"schedule": "polynomial", "warmup_epochs": 2.0}, {1: 0.05, 2: 0.1, 6: 0.025, 10: 0.0}),
        ({"schedule": "linear", "lr_scale": "linear"}, {0: 0.4, 5: 0.2, 10: 0.0}),
    ],
    ids=["linear warm-up", "from zero", "then cosine", "then linear", "then of power two", "linear from the peak"],
)
def test_warm_up_and_decay_have_these_rates_at_epochs(settings: dict[str, Any], rates: dict[float, float]) -> None:
    found = [rate(**settings)(int(epoch * EPOCH)) for epoch in rates]
    assert found == pytest.approx(list(rates.values()), abs=1e-15)


def test_exponential_decay_is_a_staircase_of_epochs() -> None:
    stairs = rate(schedule="exponential", decay_rate=0.5, decay_epochs=2.0)
    samples = [0, 2 * EPOCH - 1, 2 * EPOCH, 4 * EPOCH - 1, 4 * EPOCH]
    assert [stairs(n) for n in samples] == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025])


def test_cosine_reaches_zero_at_the_end_of_the_run() -> None:
    cosine = rate(schedule="cosine")
    assert [cosine(n * EPOCH) for n in (0, 5, 10, 11)] == pytest.approx([0.1, 0.05, 0.0, 0.0], abs=1e-15)
    assert cosine(5 * EPOCH // 2) == pytest.approx(0.05 * (1 + math.cos(math.pi / 4)))


@pytest.mark.parametrize("schedule", ["constant", "exponential", "cosine", "linear", "polynomial"])
def test_a_run_that_is_all_warm_up_has_a_rate(schedule: str) -> None:
    values = [rate(schedule=schedule, warmup_epochs=10.0)(n * EPOCH) for n in range(12)]
    assert all(math.isfinite(value) and value >= 0 for value in values)
