"""Augmentation: what a sample gets depends on the seed, the epoch and the sample alone."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.pyct import transpiler

from ringtrain.collectives.base import Solo
from ringtrain.data.augment import (
    per_image_standardization,
    random_brightness,
    random_contrast,
    random_crop,
    random_flip_left_right,
    random_shift,
    sample_keys,
    uniform,
)
from ringtrain.data.order import SampleOrder, StreamingOrder
from ringtrain.data.pipeline import local_batches
from ringtrain.data.sources import from_arrays, from_generator
from ringtrain.data.streaming import streaming_batches
from ringtrain.runtime.world import World

# Relative and absolute; the expected values are computed in float32.
TOLERANCES = {tf.float16: (1e-3, 0), tf.bfloat16: (1e-2, 0), tf.float64: (1e-6, 1e-4)}


def keys_of(indices: object, *, seed: int = 0, epoch: int = 0) -> tf.Tensor:
    return sample_keys(seed, tf.constant(epoch, tf.int64), tf.constant(indices, tf.int64))


def test_a_sample_s_numbers_do_not_depend_on_its_batch() -> None:
    together = uniform(keys_of(range(10)), 0, (3,)).numpy()
    for indices in ([7], [9, 0, 4], [3, 3]):
        np.testing.assert_array_equal(uniform(keys_of(indices), 0, (3,)), together[indices])


def test_graph_and_eager_give_the_same_numbers() -> None:
    graph = tf.function(lambda keys: uniform(keys, 2, (4,)), autograph=False)
    np.testing.assert_array_equal(graph(keys_of([5, 6])), uniform(keys_of([5, 6]), 2, (4,)))


def test_autograph_converts_only_user_functions_of_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    def augment(x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if tf.reduce_all(y > 0):
            x = -x
        return x + uniform(keys, 0)[:, tf.newaxis], y

    written = []
    plain = transpiler.PyToPy.transform_function

    def transform(of: Any, function: Any, context: Any) -> Any:
        written.append(function.__name__)
        return plain(of, function, context)

    monkeypatch.setattr(transpiler.PyToPy, "transform_function", transform)
    x, y = np.ones([4, 1], np.float32), np.array([0, 0, 1, 1])
    order = SampleOrder(num_samples=4, global_batch_size=2, shuffle=False)
    world = World(rank=0, size=1, local_rank=0, local_size=1, node="node", launcher="no launcher")
    steps: dict[str, Any] = {"first_step": 0, "end_step": 2, "num_threads": 1, "augment": augment}
    by_number = local_batches(from_arrays(x, y), order, world, **steps)
    feed = from_generator(lambda rank, size: iter([(x[:2], y[:2]), (x[2:], y[2:])]))
    fed, _, _ = streaming_batches(
        feed, StreamingOrder(num_samples=4, global_batch_size=2, is_single_pass=True), Solo(world), **steps
    )
    for batches in (by_number, fed):
        assert (np.ravel([batch.x for batch in batches]) > 0).tolist() == [True, True, False, False]
    assert set(written) == {"augment"}


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


def random_images(count: int, *, height: int = 7, width: int = 6) -> tf.Tensor:
    """Float images with values 0 to 255."""
    values = np.random.default_rng(0).integers(0, 256, (count, height, width, 3))
    return tf.constant(values, tf.float32)


def assert_each(images: tf.Tensor, changed: tf.Tensor, expected: Callable[[int, tf.Tensor], tf.Tensor]) -> None:
    """Each image was changed as TensorFlow's function for a single image does it."""
    for i, image in enumerate(images):
        np.testing.assert_allclose(changed[i], expected(i, image), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [tf.uint8, tf.float32])
def test_a_crop_is_tensorflow_s_at_an_offset_per_sample(dtype: tf.DType) -> None:
    images, keys = tf.cast(random_images(40), dtype), keys_of(range(40))
    offsets = np.floor(uniform(keys, 3, (2,)).numpy() * [7 - 4 + 1, 6 - 5 + 1]).astype(int)
    cropped = random_crop(images, keys, 4, 5, draw=3)
    assert cropped.dtype == dtype
    assert cropped.shape == (40, 4, 5, 3)
    assert_each(images, cropped, lambda i, image: tf.image.crop_to_bounding_box(image, *offsets[i], 4, 5))


def test_crop_offsets_are_uniform() -> None:
    image = np.arange(20, dtype=np.float32).reshape(1, 4, 5, 1)
    cropped = random_crop(tf.constant(np.repeat(image, 6000, axis=0)), keys_of(range(6000)), 3, 3).numpy()
    places, counts = np.unique(cropped[:, 0, 0, 0], return_counts=True)
    assert places.tolist() == [0, 1, 2, 5, 6, 7]
    assert abs(counts - 1000).max() < 150  # five standard deviations


def test_a_shift_of_zero_or_a_crop_of_the_whole_image_changes_nothing() -> None:
    images, keys = random_images(3), keys_of(range(3))
    np.testing.assert_array_equal(random_shift(images, keys, max_pixels=0), images)
    np.testing.assert_array_equal(random_crop(images, keys, 7, 6), images)


def test_a_crop_larger_than_the_image_is_refused() -> None:
    with pytest.raises(ValueError, match="8x6 does not fit into images of 7x6"):
        random_crop(random_images(1), keys_of([0]), 8, 6)


@pytest.mark.parametrize("dtype", [tf.uint8, tf.float32])
def test_half_of_the_images_are_mirrored_as_by_tensorflow(dtype: tf.DType) -> None:
    images, keys = tf.cast(random_images(400), dtype), keys_of(range(400))
    is_mirrored = uniform(keys, 2).numpy() < 0.5
    assert 150 < is_mirrored.sum() < 250
    expected = np.where(is_mirrored[:, None, None, None], tf.image.flip_left_right(images), images)
    np.testing.assert_array_equal(random_flip_left_right(images, keys, draw=2), expected)


def test_brightness_and_contrast_are_tensorflow_s_with_a_number_per_sample() -> None:
    images, keys = random_images(20), keys_of(range(20))
    drawn = uniform(keys, 1).numpy()
    deltas, factors = drawn * 126 - 63, 0.2 + 1.6 * drawn
    changed = random_brightness(images, keys, 63, draw=1)
    assert_each(images, changed, lambda i, image: tf.image.adjust_brightness(image, deltas[i]))
    changed = random_contrast(images, keys, 0.2, 1.8, draw=1)
    assert_each(images, changed, lambda i, image: tf.image.adjust_contrast(image, factors[i]))


def test_standardization_is_tensorflow_s() -> None:
    one_colour = tf.fill([1, 7, 6, 3], 200.0)
    faint = one_colour + random_images(1) / 255 / 20  # its deviation is below the smallest that counts
    images = tf.concat([random_images(20), one_colour, faint], axis=0)
    standardized = per_image_standardization(images)
    assert_each(images, standardized, lambda i, image: tf.image.per_image_standardization(image))
    assert not standardized[20].numpy().any()
    assert 0.01 < standardized[21].numpy().std() < 0.9


def distort(images: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    images = random_flip_left_right(random_crop(images, keys, 5, 4, draw=0), keys, draw=1)
    images = random_contrast(random_brightness(images, keys, 63, draw=2), keys, 0.2, 1.8, draw=3)
    return per_image_standardization(images)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_augmentation_of_an_image_is_independent_of_its_batch(dtype: tf.DType) -> None:
    images, keys = tf.cast(random_images(60), dtype), keys_of(range(60))
    together = distort(images, keys).numpy()
    assert together.dtype == dtype
    for indices in ([7], [59, 0, 4], [3, 3], range(1, 60)):
        alone = distort(tf.gather(images, indices), keys_of(indices))
        np.testing.assert_allclose(alone, together[list(indices)], rtol=0, atol=0 if dtype == tf.float32 else 1e-12)


@pytest.mark.parametrize("dtype", [tf.uint8, tf.int16, tf.int32, tf.float16, tf.bfloat16, tf.float32, tf.float64])
def test_augmentation_keeps_the_type_and_does_not_wrap_around(dtype: tf.DType) -> None:
    """It is computed in float32; integers are rounded and clipped, floats are not clipped."""
    images, keys = random_images(40), keys_of(range(40))
    lowest, highest = (0, 255) if dtype == tf.uint8 else (-1000, 1000)
    for function in (
        lambda images: random_brightness(images, keys, 63),
        lambda images: random_contrast(images, keys, 0.2, 1.8),
    ):
        expected = function(images).numpy()
        assert expected.min() < 0
        assert expected.max() > 255
        if dtype.is_integer:
            expected = np.clip(np.round(expected), lowest, highest)
        changed = function(tf.cast(images, dtype))
        assert changed.dtype == dtype
        relative, absolute = TOLERANCES.get(dtype, (1e-6, 0))
        values = changed.numpy().astype(np.float32)
        np.testing.assert_allclose(values, expected, rtol=relative, atol=absolute)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_floats_that_leave_their_range_are_not_clipped(dtype: tf.DType) -> None:
    """They become infinite, as in TensorFlow, so that checks for such values find them."""
    values = [float(dtype.max), float("inf"), float("-inf"), float("nan")]
    images = tf.reshape(tf.constant(values, dtype), [4, 1, 1, 1])
    keys = keys_of(4 * [1])
    [drawn] = uniform(keys_of([1]), 0).numpy()
    assert drawn > 0.6  # so that the brightness is increased
    brighter = random_brightness(images, keys, float(dtype.max) / 2).numpy().astype(np.float32)
    np.testing.assert_array_equal(brighter.ravel(), [np.inf, np.inf, -np.inf, np.nan])


@pytest.mark.parametrize("dtype", [tf.uint8, tf.float16, tf.float32])
def test_standardization_takes_every_type(dtype: tf.DType) -> None:
    standardized = per_image_standardization(tf.cast(random_images(20), dtype))
    assert standardized.dtype == (dtype if dtype.is_floating else tf.float32)
    expected = per_image_standardization(random_images(20)).numpy()
    np.testing.assert_allclose(standardized.numpy().astype(np.float32), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [tf.uint8, tf.float16])
def test_moved_pixels_keep_their_values_and_type(dtype: tf.DType) -> None:
    images, keys = tf.cast(random_images(20), dtype), keys_of(range(20))
    for function in (
        lambda images: random_shift(images, keys, 2),
        lambda images: random_crop(images, keys, 5, 4),
        lambda images: random_flip_left_right(images, keys),
    ):
        moved = function(images)
        assert moved.dtype == dtype
        np.testing.assert_array_equal(moved.numpy(), function(tf.cast(images, tf.float32)).numpy())


def test_no_images_are_distorted_to_no_images() -> None:
    assert distort(random_images(0), keys_of([])).shape == (0, 5, 4, 3)
