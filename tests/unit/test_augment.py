"""Augmentation: what a sample gets depends on the seed, the epoch and the sample alone."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from ringtrain.data.augment import random_shift, sample_keys, uniform


def keys_of(indices: object, *, seed: int = 0, epoch: int = 0) -> tf.Tensor:
    return sample_keys(seed, tf.constant(epoch, tf.int64), tf.constant(indices, tf.int64))


def test_a_sample_s_numbers_do_not_depend_on_its_batch() -> None:
    together = uniform(keys_of(range(10)), 0, (3,)).numpy()
    for indices in ([7], [9, 0, 4], [3, 3]):
        np.testing.assert_array_equal(uniform(keys_of(indices), 0, (3,)), together[indices])


def test_graph_and_eager_give_the_same_numbers() -> None:
    graph = tf.function(lambda keys: uniform(keys, 2, (4,)), autograph=False)
    np.testing.assert_array_equal(graph(keys_of([5, 6])), uniform(keys_of([5, 6]), 2, (4,)))


def test_seed_epoch_sample_and_draw_each_change_the_numbers() -> None:
    base = uniform(keys_of(range(50)), 0, (20,)).numpy()
    others = [
        uniform(keys_of(range(50), seed=1), 0, (20,)),
        uniform(keys_of(range(50), epoch=1), 0, (20,)),
        uniform(keys_of(range(50, 100)), 0, (20,)),
        uniform(keys_of(range(50)), 1, (20,)),
        uniform(keys_of(range(50), seed=2**63), 0, (20,)),
    ]
    for other in others:
        assert np.mean(base == other.numpy()) < 0.01
        assert abs(np.corrcoef(base.ravel(), other.numpy().ravel())[0, 1]) < 0.15


def test_the_numbers_are_uniform() -> None:
    values = uniform(keys_of(range(2000)), 0, (50,)).numpy()
    assert values.dtype == np.float32
    assert values.min() >= 0
    assert values.max() < 1
    for axis in (0, 1):  # over samples, and over the draws of one
        assert abs(values.mean(axis=axis) - 0.5).max() < 0.3
    counts, _ = np.histogram(values, bins=100, range=(0, 1))
    chi_squared = np.sum((counts - 1000.0) ** 2 / 1000.0)
    assert chi_squared < 160  # 99 degrees of freedom


def test_no_samples_give_no_numbers() -> None:
    assert uniform(keys_of([]), 0, (2, 3)).shape == (0, 2, 3)
    assert uniform(keys_of([1, 2]), 0).shape == (2,)


def test_a_shift_moves_whole_images_and_brings_in_zeros() -> None:
    image = np.arange(1, 13, dtype=np.float32).reshape(1, 3, 4, 1)
    images = tf.constant(np.repeat(image, 500, axis=0))
    shifted = random_shift(images, keys_of(range(500)), max_pixels=1).numpy()[..., 0]
    padded = np.pad(image[0, ..., 0], 1)
    possible = {padded[y : y + 3, x : x + 4].tobytes() for y in range(3) for x in range(3)}
    assert {item.tobytes() for item in shifted} == possible


def test_a_shift_by_nothing_changes_nothing() -> None:
    images = tf.random.stateless_uniform([3, 4, 4, 2], [0, 0])
    np.testing.assert_array_equal(random_shift(images, keys_of([1, 2, 3]), max_pixels=0), images)
