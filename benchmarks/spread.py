"""Medians, and how sure they are: pure functions of numbers."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Spread:
    count: int
    min: float
    lower_quartile: float
    median: float
    upper_quartile: float
    max: float
    low: float  # low to high: distribution-free interval of the true median
    high: float
    confidence: float  # CONFIDENCE, or less for few numbers


def describe_spread(values: Sequence[float]) -> Spread:
    """``values``: at least one."""
    ordered = sorted(values)
    place, confidence = choose_order_statistic(len(ordered))
    quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return Spread(
        count=len(ordered),
        min=ordered[0],
        lower_quartile=quartiles[0],
        median=statistics.median(ordered),
        upper_quartile=quartiles[2],
        max=ordered[-1],
        low=ordered[place - 1],
        high=ordered[-place],
        confidence=confidence,
    )


def choose_order_statistic(count: int) -> tuple[int, float]:
    """Return the largest k for which the k-th smallest and k-th largest of ``count`` numbers enclose the median with
    ``CONFIDENCE``, or 1; and the confidence.

    The interval misses the true median only if fewer than k numbers are on one side, each with probability 1/2 (David
    and Nagaraja, Order Statistics, 2003, section 7.1).
    """
    missed = itertools.accumulate(math.comb(count, fewer) * 0.5**count for fewer in range((count + 1) // 2))
    confidences = [1 - 2 * chance for chance in missed]  # 1 - 2 P(Binomial(count, 1/2) < k), for k = 1, 2, ...
    place = max(1, sum(confidence >= CONFIDENCE for confidence in confidences))
    return place, max(confidences[place - 1], 0.0)


def paired_ratios(numerators: Sequence[float | None], denominators: Sequence[float | None]) -> list[float]:
    """Ratios of the rounds in which both were measured."""
    pairs = zip(numerators, denominators, strict=True)
    return [above / below for above, below in pairs if above is not None and below is not None]
