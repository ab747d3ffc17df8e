"""The latency and rate of a ring that ``ringtrain bench`` fits to its measured times."""

import pytest

from ringtrain.collectives.timing import fit_ring
from ringtrain.commands.bench import describe_ring
from ringtrain.runtime.world import World

GBIT = 12.5
LATENCY_US = 40.0
NUM_RANKS = 4


def ring_seconds(num_bytes: int) -> float:
    """The seconds of a ring of four ranks, whose links have this rate and latency."""
    num_messages = 2 * (NUM_RANKS - 1)
    sent_bits = 8 * num_messages / NUM_RANKS * num_bytes
    return num_messages * LATENCY_US * 1e-6 + sent_bits / (GBIT * 1e9)


TIMES = [(num_bytes, ring_seconds(num_bytes)) for num_bytes in (1024, 2**16, 2**22, 2**28)]


def test_a_ring_is_fitted_to_measured_sums() -> None:
    fit = fit_ring(TIMES, NUM_RANKS)
    assert fit is not None
    assert fit == pytest.approx((GBIT, LATENCY_US))


def test_times_that_fall_with_the_bytes_fit_no_ring() -> None:
    assert fit_ring([(1024, 2e-5), (4096, 1e-5)], NUM_RANKS) is None


@pytest.mark.parametrize(
    ("local_size", "words"),
    [(NUM_RANKS, "between the ranks of a node"), (1, "between the nodes"), (2, "")],
)
def test_the_links_of_one_kind_are_described(local_size: int, words: str) -> None:
    world = World(rank=0, size=NUM_RANKS, local_rank=0, local_size=local_size, node="a", launcher="mpirun")
    line = describe_ring(world, TIMES)
    if words:
        assert line == f"as a ring: 12.5 Gbit/s and 40 us a message {words}"
    else:
        assert line == ""  # links of two kinds
    assert describe_ring(world, TIMES[:1]) == ""
