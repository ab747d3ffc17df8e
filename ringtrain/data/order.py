"""Samples of global batch k: a pure function of (seed, step), independent of the number of ranks.

Each epoch is a permutation by (seed, epoch): a Feistel network with cycle walking (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", 2002), which needs no storage and resumes anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringtrain.errors import DataError

FEISTEL_ROUNDS = 8
PLANNED_SAMPLES = 4096  # of one rank, per call: a call costs as much as thousands of samples


class LocalBatch(NamedTuple):
    step: int  # from 0
    epoch: int  # from 0
    global_count: int  # samples of all ranks
    indices: npt.NDArray[np.int64]  # this rank's samples [n]; n may be 0


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    num_samples: int
    global_batch_size: int  # samples per step, at least 1; an epoch's last step may have fewer
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError(f"the data set holds {self.num_samples} samples; at least 1 is needed. Look at its files.")

    @property
    def known_samples(self) -> int | None:
        """None for streams."""
        return self.num_samples

    @property
    def has_known_length(self) -> bool:
        """False for one pass of a stream, as long as its data last."""
        return True

    @property
    def depends_on_ranks(self) -> bool:
        """True if the samples of a step depend on the number of ranks."""
        return False

    def describe_samples(self) -> str:
        return f"{self.num_samples:,} samples"

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.global_batch_size)

    def samples_before(self, step: int) -> int:
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        return epoch * self.num_samples + step_in_epoch * self.global_batch_size

    def global_count(self, step: int) -> int:
        return self.samples_before(step + 1) - self.samples_before(step)

    def local_batch(self, step: int, *, rank: int, size: int) -> LocalBatch:
        """A contiguous slice; sizes differ by at most 1 between ranks."""
        [planned] = self._plan(step, step + 1, rank=rank, size=size)
        return planned

    def local_batches(self, first_step: int, end_step: int, *, rank: int, size: int) -> Iterator[LocalBatch]:
        """``end_step`` is exclusive."""
        steps_at_once = max(1, PLANNED_SAMPLES * size // self.global_batch_size)
        step = first_step
        while step < end_step:
            end_of_epoch = step - step % self.steps_per_epoch + self.steps_per_epoch
            end = min(end_step, end_of_epoch, step + steps_at_once)
            yield from self._plan(step, end, rank=rank, size=size)
            step = end

    def _plan(self, first_step: int, end_step: int, *, rank: int, size: int) -> list[LocalBatch]:
        """Plan steps of one epoch."""
        epoch, first_in_epoch = divmod(first_step, self.steps_per_epoch)
        counts = [self.global_count(step) for step in range(first_step, end_step)]
        starts = [self.global_batch_size * (first_in_epoch + number) for number in range(len(counts))]
        slices = [
            np.arange(start + count * rank // size, start + count * (rank + 1) // size, dtype=np.int64)
            for start, count in zip(starts, counts, strict=True)
        ]
        indices = np.concatenate(slices)
        if self.shuffle:
            indices = permute(indices, self.num_samples, (self.seed, epoch))
        parts = np.split(indices, np.cumsum([len(positions) for positions in slices])[:-1])
        return [
            LocalBatch(first_step + number, epoch, count, part)
            for number, (count, part) in enumerate(zip(counts, parts, strict=True))
        ]


@dataclass(frozen=True, kw_only=True)
class StreamingOrder(SampleOrder):
    """Steps of streams (``ringtrain.data.streaming``).

    Sample counts are unknown: ``num_samples``, and so the learning rate's schedule, count ``global_batch_size`` per
    step.
    """

    is_single_pass: bool  # training ends when no rank has data
    has_known_length: bool = True  # False: one pass, as long as the data last
    is_shared: bool = False  # ranks slice the same data: the same steps for any number of ranks

    @property
    def known_samples(self) -> None:
        return None

    @property
    def depends_on_ranks(self) -> bool:
        return not self.is_shared

    def describe_samples(self) -> str:
        return "every rank reads all samples, and takes its slice" if self.is_shared else "samples fed by each rank"


def permute(positions: npt.NDArray[np.int64], domain_size: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Map positions [n] to samples [n] by a pseudo-random permutation of ``range(domain_size)``.

    SeedSequence is stable across NumPy versions.
    """
    half_bits = max(1, (max(domain_size - 1, 1).bit_length() + 1) // 2)
    seeds = np.random.SeedSequence([word & (2**64 - 1) for word in key])
    round_keys = seeds.generate_state(FEISTEL_ROUNDS, np.uint64).astype(np.uint64)
    values = _feistel(positions.astype(np.uint64), half_bits, round_keys)
    # Cycle walking: repeat until the value is in the domain, which has more than a quarter of the 4**half_bits values.
    outside = np.flatnonzero(values >= domain_size)
    while outside.size:
        values[outside] = _feistel(values[outside], half_bits, round_keys)
        outside = outside[values[outside] >= domain_size]
    return values.astype(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], half_bits: int, round_keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """A balanced Feistel network on 2*half_bits bits: invertible for any round function."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right + round_key) & mask)
    return (left << shift) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
