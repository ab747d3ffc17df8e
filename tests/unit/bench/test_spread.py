"""Medians and how sure they are."""

import itertools

import pytest

from benchmarks.spread import choose_order_statistic, describe_spread, paired_ratios


@pytest.mark.parametrize(
    ("count", "place", "confidence"), [(5, 1, 0.9375), (7, 1, 0.984), (9, 2, 0.961), (15, 4, 0.965), (20, 6, 0.959)]
)
def test_the_interval_of_the_median_is_that_of_the_tables(count: int, place: int, confidence: float) -> None:
    """David and Nagaraja, table of distribution-free intervals for the median."""
    chosen, its_confidence = choose_order_statistic(count)
    assert chosen == place
    assert its_confidence == pytest.approx(confidence, abs=1e-3)


@pytest.mark.parametrize("count", [3, 6, 8, 9, 10])
def test_the_confidence_is_the_coverage_of_the_median(count: int) -> None:
    place, confidence = choose_order_statistic(count)
    # Each value lies below or above the true median with the same chance: all cases are alike.
    held = sum(place <= sum(below) <= count - place for below in itertools.product((0, 1), repeat=count))
    assert confidence == pytest.approx(held / 2**count)


def test_a_spread_holds_median_quartiles_and_ends() -> None:
    spread = describe_spread([5, 1, 4, 2, 3])
    assert (spread.min, spread.lower_quartile, spread.median, spread.upper_quartile, spread.max) == (1, 2, 3, 4, 5)
    assert (spread.low, spread.high, spread.count) == (1, 5, 5)


def test_one_number_has_a_spread_without_confidence() -> None:
    spread = describe_spread([2.0])
    assert (spread.min, spread.median, spread.max, spread.confidence) == (2, 2, 2, 0)


def test_ratios_are_of_rounds_in_which_both_were_measured() -> None:
    assert paired_ratios([1.0, None, 3.0, 4.0], [2.0, 2.0, None, 1.0]) == [0.5, 4.0]
