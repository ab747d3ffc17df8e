"""The order of samples: a permutation of each epoch that knows neither ranks nor world size."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtrain.data.order import SampleOrder, permute
from ringtrain.errors import DataError

sizes = st.integers(1, 200_000)
keys = st.tuples(st.integers(0, 2**63), st.integers(0, 10_000))


def whole(num_samples: int, key: tuple[int, ...]) -> np.ndarray:
    return permute(np.arange(num_samples), num_samples, key)


def test_every_small_domain_is_permuted() -> None:
    for num_samples in range(1, 301):
        for key in ((0, 0), (7, 3)):
            assert sorted(whole(num_samples, key)) == list(range(num_samples)), num_samples


@given(sizes, keys)
@settings(max_examples=40, deadline=None)
def test_every_domain_is_permuted(num_samples: int, key: tuple[int, int]) -> None:
    np.testing.assert_array_equal(np.sort(whole(num_samples, key)), np.arange(num_samples))


@given(st.integers(2**33, 2**40), keys)
@settings(max_examples=20, deadline=None)
def test_positions_of_a_huge_domain_are_found_without_storing_it(num_samples: int, key: tuple[int, int]) -> None:
    positions = np.linspace(0, num_samples - 1, 1000, dtype=np.int64)
    samples = permute(positions, num_samples, key)
    assert len(np.unique(samples)) == 1000
    assert samples.min() >= 0
    assert samples.max() < num_samples


@given(st.integers(1, 5000), keys, st.data())
@settings(max_examples=40, deadline=None)
def test_the_sample_of_a_position_is_independent_of_the_query(
    num_samples: int, key: tuple[int, int], data: st.DataObject
) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, num_samples - 1), max_size=20)), np.int64)
    np.testing.assert_array_equal(permute(positions, num_samples, key), whole(num_samples, key)[positions])


# 17: one more than four bits tell apart.
@pytest.mark.parametrize(("num_samples", "limit"), [(11, 160), pytest.param(17, 350, marks=pytest.mark.slow)])
def test_each_position_holds_each_sample_equally_often(num_samples: int, limit: float) -> None:
    epochs = 4000
    counts = np.zeros((num_samples, num_samples))
    for epoch in range(epochs):
        counts[np.arange(num_samples), whole(num_samples, (3, epoch))] += 1
    expected = epochs / num_samples
    chi_squared = np.sum((counts - expected) ** 2 / expected)
    assert chi_squared < limit  # 100 and 256 degrees of freedom: above it with a probability of 1e-4


def epoch_of(order: SampleOrder, epoch: int) -> np.ndarray:
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    return np.concatenate([order.local_batch(step, rank=0, size=1).indices for step in steps])


def test_each_epoch_has_every_sample_once_in_a_new_order() -> None:
    order = SampleOrder(num_samples=1003, global_batch_size=100, seed=5)
    epochs = [epoch_of(order, epoch) for epoch in range(5)]
    epochs.append(epoch_of(SampleOrder(num_samples=1003, global_batch_size=100, seed=6), 0))
    for number, samples in enumerate(epochs):
        np.testing.assert_array_equal(np.sort(samples), np.arange(1003))
        for other in epochs[:number]:
            assert np.mean(samples == other) < 0.02  # one in a thousand by chance


def test_over_epochs_each_step_holds_samples_equally_often() -> None:
    order = SampleOrder(num_samples=12, global_batch_size=3)
    epochs = 1000
    counts = np.zeros((4, 12))  # [steps, samples]
    for epoch in range(epochs):
        for step in range(4):
            counts[step, order.local_batch(4 * epoch + step, rank=0, size=1).indices] += 1
    expected = epochs * 3 / 12
    chi_squared = np.sum((counts - expected) ** 2 / expected)
    assert chi_squared < 70  # 33 degrees of freedom: above 70 with a probability of 1e-4 or less


def test_neighbours_are_spread() -> None:
    order = whole(100_000, (0, 0))
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.02  # six standard deviations


def test_epochs_and_seeds_have_their_own_orders() -> None:
    orders = [whole(1000, key) for key in ((0, 0), (0, 1), (1, 0), (1, 1), (2**64 - 1, 0))]
    for number, order in enumerate(orders):
        for other in orders[:number]:
            assert np.mean(order == other) < 0.02


def test_the_order_of_a_seed_is_that_of_every_version() -> None:
    """A run that goes on in the middle of an epoch would else train on some samples twice, and on others never."""
    assert whole(12, (3, 1)).tolist() == [3, 11, 4, 10, 5, 2, 9, 6, 7, 0, 8, 1]
    samples = whole(100_003, (2**63 + 1, 7)).astype("<i8").tobytes()
    assert hashlib.sha256(samples).hexdigest() == "ed9375234cac503cc292c5811d52bbd6b4c84582570917db1b38e101cbaaa725"


@given(st.integers(1, 400), st.integers(1, 120), st.integers(1, 9), st.integers(0, 5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_rank_slices_partition_every_batch_for_any_world_size(
    num_samples: int, global_batch_size: int, size: int, seed: int, shuffle: bool
) -> None:
    order = SampleOrder(num_samples=num_samples, global_batch_size=global_batch_size, seed=seed, shuffle=shuffle)
    seen: list[int] = []
    for step in range(order.steps_per_epoch):
        batches = [order.local_batch(step, rank=rank, size=size) for rank in range(size)]
        lengths = [len(batch.indices) for batch in batches]
        assert max(lengths) - min(lengths) <= 1
        joined = np.concatenate([batch.indices for batch in batches])
        np.testing.assert_array_equal(joined, order.local_batch(step, rank=0, size=1).indices)
        assert {batch.global_count for batch in batches} == {len(joined)} == {order.global_count(step)}
        assert {(batch.step, batch.epoch) for batch in batches} == {(step, 0)}
        seen += joined.tolist()
    assert sorted(seen) == list(range(num_samples))


@given(st.integers(1, 20_000), st.integers(1, 5_000), st.integers(1, 3), st.integers(0, 40), st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_steps_planned_together_equal_steps_planned_one_by_one(
    num_samples: int, global_batch_size: int, size: int, first_step: int, num_steps: int
) -> None:
    order = SampleOrder(num_samples=num_samples, global_batch_size=global_batch_size)
    end_step = first_step + num_steps
    at_once = list(order.local_batches(first_step, end_step, rank=size - 1, size=size))
    assert [batch.step for batch in at_once] == list(range(first_step, end_step))
    for batch in at_once:
        alone = order.local_batch(batch.step, rank=size - 1, size=size)
        assert (batch.epoch, batch.global_count) == (alone.epoch, alone.global_count)
        np.testing.assert_array_equal(batch.indices, alone.indices)


@given(st.integers(1, 300), st.integers(1, 100), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_samples_before_a_step_are_those_of_the_steps_before_it(
    num_samples: int, global_batch_size: int, step: int
) -> None:
    order = SampleOrder(num_samples=num_samples, global_batch_size=global_batch_size)
    assert order.samples_before(0) == 0
    assert order.samples_before(step + 1) - order.samples_before(step) == order.global_count(step) >= 1
    assert order.samples_before(order.steps_per_epoch) == num_samples


def test_the_last_batch_of_an_epoch_holds_the_rest() -> None:
    order = SampleOrder(num_samples=10, global_batch_size=4)
    assert [order.global_count(step) for step in range(6)] == [4, 4, 2, 4, 4, 2]
    assert [order.local_batch(step, rank=0, size=1).epoch for step in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [len(order.local_batch(2, rank=rank, size=3).indices) for rank in range(3)] == [0, 1, 1]


def test_a_batch_larger_than_the_data_is_the_data() -> None:
    order = SampleOrder(num_samples=3, global_batch_size=100)
    assert order.steps_per_epoch == 1
    assert sorted(order.local_batch(0, rank=0, size=1).indices) == [0, 1, 2]


def test_without_shuffling_the_order_is_the_stored_one() -> None:
    order = SampleOrder(num_samples=5, global_batch_size=2, shuffle=False)
    batches = list(order.local_batches(0, 3, rank=0, size=1))
    assert [batch.indices.tolist() for batch in batches] == [[0, 1], [2, 3], [4]]


def test_an_empty_data_set_is_an_error() -> None:
    with pytest.raises(DataError, match="0 samples"):
        SampleOrder(num_samples=0, global_batch_size=1)
