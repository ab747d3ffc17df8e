"""The time of a step on more devices.

A step takes the compute of its slowest device, and the communication that the backward pass does not hide: between none
and all that the groups of the reduction allow to hide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from ringtrain.collectives.groups import GradientSpec, plan_groups
from ringtrain.predict.cluster import Cluster

CONVOLUTION_RANK = 4  # of its kernel
BACKWARD_SHARE = 2 / 3  # of the compute: two products of matrices where the forward pass has one


class Scenario(NamedTuple):
    """Assumptions of what was not measured."""

    overlap: float  # 1: all communication that the groups allow is hidden; 0: none
    link_share: float  # of its rate that a link reaches
    variation: float  # of the devices' compute in a step: standard deviation over mean
    contention: float  # of the compute that many devices of a node add to that of one, as they share its host


SCENARIOS = {
    "low": Scenario(overlap=0.0, link_share=0.7, variation=0.08, contention=0.1),
    "expected": Scenario(overlap=0.95, link_share=0.9, variation=0.025, contention=0.06),
    "high": Scenario(overlap=1.0, link_share=1.0, variation=0.0, contention=0.0),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """A device's work in a step."""

    step_sec: float  # measured on ``measured_on`` devices
    shapes: Sequence[Sequence[int]]  # of the trainable variables, in the order of the forward pass
    batch_size: float  # of a device
    value_bytes: int = 4  # of a number of a gradient
    compute_sec: float | None = None  # of the step without communication; None: by the model
    measured_on: int = 1
    accumulate: int = 1  # micro-batches, of which the last one's backward pass hides communication
    input_rate: float | None = None  # samples per second that a device's input delivers at most; None: no limit
    save_sec: float = 0.0  # of a checkpoint, which is written every ``save_every`` steps, and one at a time
    save_every: int = 0

    @property
    def gradient_bytes(self) -> list[int]:
        return [self.value_bytes * math.prod(shape) for shape in self.shapes]

    def least_sec(self, share: float) -> float:
        """Return the seconds that input and checkpoints take at least for a step with this share of the batch."""
        input_sec = share * self.batch_size / self.input_rate if self.input_rate else 0.0
        return max(input_sec, self.save_sec / self.save_every if self.save_every else 0.0)

    def ready(self, variable: int) -> float:
        """Return the share of the backward pass after which a variable's gradient is known.

        Each convolution takes as long as another, and a dense layer next to nothing; without convolutions all kernels
        take the same.
        """
        ranks = [len(shape) for shape in self.shapes]
        least = next((rank for rank in (CONVOLUTION_RANK, 2, 0) if max(ranks) >= rank), 0)
        kernels = [rank >= least for rank in ranks]
        return sum(kernels[variable:]) / sum(kernels)


class Forecast(NamedTuple):
    devices: int
    examples_per_sec: float
    efficiency: float  # of a device, relative to the measured one
    step_sec: float
    exposed_sec: float  # communication that is not hidden
    is_limited: bool  # by input or checkpoints


def forecast(
    work: Work, cluster: Cluster, devices: int, scenario: Scenario, *, batch_size: float | None = None
) -> Forecast:
    """``batch_size``: another one of a device; the compute is proportional to it."""
    share = 1.0 if batch_size is None else batch_size / work.batch_size
    compute = share * find_compute(work, cluster, scenario)
    exposed = find_exposed(work, cluster, devices, compute, scenario)
    step_sec = compute * slowdown_of(devices, cluster, scenario) + exposed
    least_sec = work.least_sec(share)
    is_limited, step_sec = step_sec < least_sec, max(step_sec, least_sec)
    rate = devices * share * work.batch_size / step_sec
    return Forecast(devices, rate, share * work.step_sec / step_sec, step_sec, exposed, is_limited)


def find_compute(work: Work, cluster: Cluster, scenario: Scenario) -> float:
    """Return the mean compute in the measured step of a device that is alone in its node."""
    slowdown = slowdown_of(work.measured_on, cluster, scenario)
    if work.compute_sec is not None:
        return work.compute_sec / slowdown
    compute = work.step_sec
    for _ in range(20):  # what is hidden depends on it
        exposed = find_exposed(work, cluster, work.measured_on, compute, scenario)
        compute = max(work.step_sec - exposed, work.step_sec / 20) / slowdown
    return compute


def find_exposed(work: Work, cluster: Cluster, devices: int, compute: float, scenario: Scenario) -> float:
    """Simulate the groups of the reduction, each of which is ready after its share of the backward pass."""
    links, sizes = cluster.scaled(scenario.link_share), work.gradient_bytes
    if devices == 1:
        return 0.0
    groups = plan_groups([GradientSpec(num_bytes, "float32", False) for num_bytes in sizes])
    seconds = [links.all_reduce_sec(sum(sizes[index] for index in group), devices) for group in groups]
    backward, end = BACKWARD_SHARE * compute / work.accumulate, 0.0
    for group, group_sec in zip(groups, seconds, strict=True):
        end = max(end, backward * work.ready(min(group))) + group_sec
    return scenario.overlap * (end - backward) + (1 - scenario.overlap) * sum(seconds)


def slowdown_of(devices: int, cluster: Cluster, scenario: Scenario) -> float:
    """Return the compute of the slowest of the devices, relative to one device's mean."""
    others = 1 - 1 / min(devices, cluster.devices_per_node)
    return slowest_of(devices, scenario.variation) * (1 + scenario.contention * others)


def slowest_of(devices: int, variation: float) -> float:
    """Expected maximum of normal numbers with mean 1 (Blom 1958, Statistical Estimates and Transformed Variables)."""
    return 1 + variation * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


def last_worthwhile(rates: Sequence[float], share: float = 0.5) -> int:
    """Return the last node that adds at least ``share`` of the first's rate; ``rates``: of 1 node, 2, and so on."""
    gains = [rates[0], *(later - earlier for earlier, later in itertools.pairwise(rates))]
    return max(nodes for nodes, gain in enumerate(gains, start=1) if gain >= share * rates[0])
