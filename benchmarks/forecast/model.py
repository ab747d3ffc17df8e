"""The time of a step on more devices.

A step takes the compute of its slowest device, and the communication that the backward pass does
not hide: between none and all that the groups of the reduction allow to hide.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from benchmarks.forecast.cluster import Cluster
from ringtrain.collectives.groups import GradientSpec, plan_groups

CONVOLUTION_RANK = 4  # of its kernel
MATRIX_RANK = 2
BACKWARD_SHARE = 2 / 3  # of the compute: two products of matrices where the forward pass has one
UNIFORM_VARIABLES = 50  # for a number of parameters alone


class Scenario(NamedTuple):
    """Assumptions of what was not measured."""

    overlap: float
    """share of the communication that is hidden, of all that the groups allow to hide"""

    link_share: float
    """of its rate that a link reaches"""

    variation: float
    """of the devices' compute in a step: standard deviation over mean"""

    contention: float
    """of the compute that many devices of a node add to that of one, as they share its host"""

    def describe(self) -> str:
        """Return all assumptions in a line."""
        return (
            f"overlap {self.overlap:.0%}, links at {self.link_share:.0%} of their rate, "
            f"compute varies by {self.variation:.1%}, contention in a node {self.contention:.0%}"
        )


SCENARIOS = {
    "low": Scenario(overlap=0.0, link_share=0.7, variation=0.08, contention=0.1),
    "expected": Scenario(overlap=0.95, link_share=0.9, variation=0.025, contention=0.06),
    "high": Scenario(overlap=1.0, link_share=1.0, variation=0.0, contention=0.0),
}


class Group(NamedTuple):
    """Gradients that are reduced together."""

    num_bytes: int
    ready: float  # share of the backward pass after which all of them are known


@dataclass(frozen=True, kw_only=True)
class Work:
    """A device's work in a step."""

    step_sec: float
    """measured on ``measured_on`` devices"""

    shapes: Sequence[Sequence[int]]
    """of the trainable variables, in the order of the forward pass"""

    batch_size: float
    """samples of a device"""

    value_bytes: int = 4
    """bytes of a number of a gradient"""

    compute_sec: float | None = None
    """seconds of the step without communication; None: by the model"""

    measured_on: int = 1

    accumulate: int = 1
    """micro-batches, of which the last one's backward pass hides communication"""

    input_rate: float | None = None
    """samples per second that a device's input delivers at most; None: no limit"""

    save_sec: float = 0.0
    """seconds of a checkpoint; they are written one at a time"""

    save_every: int = 0
    """steps from one checkpoint to the next; 0: none is written"""

    @property
    def gradient_bytes(self) -> list[int]:
        return [self.value_bytes * math.prod(shape) for shape in self.shapes]

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The groups of the reduction, in the order in which they are ready."""
        num_bytes = self.gradient_bytes
        specs = [GradientSpec(size, "float32", is_sparse=False) for size in num_bytes]
        groups = []
        for indices in plan_groups(specs):
            group_bytes = sum(num_bytes[index] for index in indices)
            groups.append(Group(group_bytes, self.ready(min(indices))))
        return groups

    def least_sec(self, share: float) -> float:
        """Return the least seconds of a step with this share of the batch.

        Input and checkpoints take them.
        """
        input_sec = 0.0
        if self.input_rate:
            input_sec = share * self.batch_size / self.input_rate
        save_sec = 0.0
        if self.save_every:
            save_sec = self.save_sec / self.save_every
        return max(input_sec, save_sec)

    def ready(self, variable: int) -> float:
        """Return the share of the backward pass after which a variable's gradient is known.

        Each convolution takes as long as another, and a dense layer next to nothing; without
        convolutions all kernels take the same.
        """
        ranks = [len(shape) for shape in self.shapes]
        kernel_rank = 0
        for rank in (MATRIX_RANK, CONVOLUTION_RANK):
            if max(ranks) >= rank:
                kernel_rank = rank
        is_kernel = [rank >= kernel_rank for rank in ranks]
        return sum(is_kernel[variable:]) / sum(is_kernel)


class Forecast(NamedTuple):
    """The speed on a number of devices."""

    devices: int
    examples_per_sec: float
    efficiency: float  # of a device, relative to the measured one
    step_sec: float
    exposed_sec: float  # communication that is not hidden
    is_limited: bool  # by input or checkpoints


def uniform(parameters: int) -> list[list[int]]:
    """Return the shapes of equal variables with so many parameters."""
    return [[max(parameters // UNIFORM_VARIABLES, 1)]] * UNIFORM_VARIABLES


def forecast(
    work: Work,
    cluster: Cluster,
    devices: int,
    scenario: Scenario,
    *,
    batch_size: float | None = None,
) -> Forecast:
    """Forecast the speed of work on so many devices.

    ``batch_size``: another one of a device; the compute is proportional to it.
    """
    share = 1.0
    if batch_size is not None:
        share = batch_size / work.batch_size
    compute_sec = share * find_compute(work, cluster, scenario)
    exposed_sec = find_exposed(work, cluster, devices, compute_sec, scenario)
    unlimited_sec = compute_sec * slowdown_of(devices, cluster, scenario) + exposed_sec
    step_sec = max(unlimited_sec, work.least_sec(share))
    return Forecast(
        devices=devices,
        examples_per_sec=devices * share * work.batch_size / step_sec,
        efficiency=share * work.step_sec / step_sec,
        step_sec=step_sec,
        exposed_sec=exposed_sec,
        is_limited=step_sec > unlimited_sec,
    )


def find_compute(work: Work, cluster: Cluster, scenario: Scenario) -> float:
    """Return the mean seconds of compute in the measured step, of a device alone in its node."""
    slowdown = slowdown_of(work.measured_on, cluster, scenario)
    if work.compute_sec is not None:
        return work.compute_sec / slowdown
    compute_sec = work.step_sec
    for _ in range(20):  # what is hidden depends on it
        exposed_sec = find_exposed(work, cluster, work.measured_on, compute_sec, scenario)
        compute_sec = max(work.step_sec - exposed_sec, work.step_sec / 20) / slowdown
    return compute_sec


def find_exposed(work: Work, cluster: Cluster, devices: int, compute_sec: float, scenario: Scenario) -> float:
    """Return the seconds of communication that are not hidden.

    Each group of the reduction starts when its gradients are ready, after the group before it.
    """
    if devices == 1:
        return 0.0
    links = cluster.scaled(scenario.link_share)
    backward_sec = BACKWARD_SHARE * compute_sec / work.accumulate
    end = 0.0
    total_sec = 0.0
    for group in work.groups:
        group_sec = links.all_reduce_sec(group.num_bytes, devices)
        end = max(end, backward_sec * group.ready) + group_sec
        total_sec += group_sec
    least_sec = end - backward_sec
    return scenario.overlap * least_sec + (1 - scenario.overlap) * total_sec


def slowdown_of(devices: int, cluster: Cluster, scenario: Scenario) -> float:
    """Return the compute of the slowest of the devices, relative to one device's mean."""
    others = 1 - 1 / min(devices, cluster.devices_per_node)
    return slowest_of(devices, scenario.variation) * (1 + scenario.contention * others)


def slowest_of(devices: int, variation: float) -> float:
    """Return the expected maximum of normal numbers with mean 1.

    Blom 1958, Statistical Estimates and Transformed Variables.
    """
    return 1 + variation * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


def last_worthwhile(rates: Sequence[float], share: float = 0.5) -> int:
    """Return the last node that adds at least ``share`` of the first's rate.

    ``rates``: of 1 node, 2, and so on.
    """
    last = 1
    for nodes in range(2, len(rates) + 1):
        gain = rates[nodes - 1] - rates[nodes - 2]
        if gain >= share * rates[0]:
            last = nodes
    return last
