"""The workload cifar10 is TensorFlow's tutorial: its network, its recipe, and what happens to the images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.data.formats.cifar10 import FILES, RECORD_BYTES
from ringtrain.data.sources import ArraySource
from ringtrain.workloads import load_workload
from ringtrain.workloads.cifar10 import CROP_SIZE, Cifar10, prepare_for_evaluation, rescale
from ringtrain.workloads.response_normalization import LocalResponseNormalization
from tests.unit.images import keys_of, random_images

LRN: dict[str, Any] = {"depth_radius": 4, "bias": 1.0, "alpha": 0.001 / 9, "beta": 0.75}


def test_the_recipe_has_256_epochs() -> None:
    assert load_workload("cifar10").defaults["epochs"] == 256


def test_the_model_is_the_tutorial_s() -> None:
    model = load_workload("cifar10")().create_model()
    assert model.count_params() == 1_068_298
    assert [(layer.name, layer.output.shape[1:]) for layer in model.layers] == [
        ("conv1", (24, 24, 64)),
        ("pool1", (12, 12, 64)),
        ("norm1", (12, 12, 64)),
        ("conv2", (12, 12, 64)),
        ("norm2", (12, 12, 64)),
        ("pool2", (6, 6, 64)),
        (model.layers[6].name, (2304,)),
        ("local3", (384,)),
        ("local4", (192,)),
        ("softmax_linear", (10,)),
    ]
    first = {"conv1": (5e-2, 0.0), "conv2": (5e-2, 0.1), "local3": (0.04, 0.1), "local4": (0.04, 0.1)}
    for name, (stddev, bias) in {**first, "softmax_linear": (1 / 192, 0.0)}.items():
        kernel, biases = (np.asarray(value) for value in model.get_layer(name).weights)
        assert abs(kernel).max() <= 2.01 * stddev / 0.8796  # cut at two; 0.8796: what the cut leaves of the deviation
        assert 0.8 * stddev < kernel.std() < 1.2 * stddev
        np.testing.assert_array_equal(biases, np.float32(bias))


def expected_weight_decay(model: keras.Model, factor: float = 0.004) -> float:
    kernels = [tf.cast(model.get_layer(name).kernel.value, tf.float64) for name in ("local3", "local4")]
    return float(sum(factor * tf.nn.l2_loss(kernel) for kernel in kernels))


def test_weight_decay_is_the_tutorial_s() -> None:
    model = Cifar10().create_model()
    assert float(sum(model.losses)) == pytest.approx(expected_weight_decay(model), rel=1e-5)


def test_float64_runs(float64: None) -> None:
    model = Cifar10().create_model()
    images, labels = prepare_for_evaluation(random_images(4)), tf.range(4, dtype=tf.int64)
    with tf.GradientTape() as tape:
        losses = Cifar10().loss(labels, model(images, training=True))
        objective = tf.reduce_sum(losses) + sum(model.losses)
    gradients = tape.gradient(objective, [variable.value for variable in model.trainable_variables])
    assert losses.shape == (4,)
    assert {gradient.dtype for gradient in gradients} == {losses.dtype} == {tf.float64}
    factor = 2 * float(model.get_layer("local3").kernel_regularizer(tf.ones([1], tf.float64)))
    assert factor == pytest.approx(0.004, rel=1e-7)  # Keras from 3.14 on rounds it to a float32
    assert float(sum(model.losses)) == pytest.approx(expected_weight_decay(model, factor), rel=1e-12)


def test_half_precision_runs() -> None:
    layer = LocalResponseNormalization(**LRN, dtype="mixed_float16")
    inputs = np.full((1, 1, 1, 64), 1000, np.float32)  # whose square half precision does not hold
    outputs = layer(inputs)
    assert outputs.dtype == tf.float16
    np.testing.assert_allclose(outputs, tf.nn.local_response_normalization(inputs, **LRN), rtol=1e-3)


@pytest.mark.parametrize("options", [LRN, {"depth_radius": 2, "bias": 2.0, "alpha": 0.3, "beta": 0.5}])
def test_response_normalization_is_tensorflow_s(options: dict[str, Any]) -> None:
    generator = np.random.default_rng(0)
    inputs, upstream = (tf.constant(generator.normal(0, 3, (2, 3, 4, 16)), tf.float32) for _ in range(2))
    layer = LocalResponseNormalization(**options)

    def run(normalize: Callable[[tf.Tensor], tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = normalize(inputs)
        return outputs, tape.gradient(outputs, inputs, upstream)

    for ours, tensorflows in zip(
        run(layer), run(lambda inputs: tf.nn.local_response_normalization(inputs, **options)), strict=True
    ):
        np.testing.assert_allclose(ours, tensorflows, rtol=1e-6, atol=1e-6)


def test_response_normalization_has_the_digits_of_float64() -> None:
    inputs = np.random.default_rng(0).normal(0, 30, (2, 64))
    sums = [np.square(inputs[:, max(0, i - 4) : i + 5]).sum(axis=1) for i in range(64)]
    expected = inputs / (1 + 0.001 / 9 * np.stack(sums, axis=1)) ** 0.75
    np.testing.assert_allclose(LocalResponseNormalization(**LRN, dtype="float64")(inputs), expected, rtol=1e-13)


def test_the_model_is_saved_and_loaded(tmp_path: Path) -> None:
    model, images = Cifar10().create_model(), prepare_for_evaluation(random_images(2))
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(images), model(images))


def test_training_images_are_distorted_and_standardised() -> None:
    images, labels = random_images(50), tf.range(50, dtype=tf.int64)
    augment = tf.function(Cifar10().augment, autograph=False)
    x, y = augment(images, labels, keys_of(50))
    assert x.shape == (50, CROP_SIZE, CROP_SIZE, 3)
    assert x.dtype == tf.float32
    np.testing.assert_array_equal(y, labels)
    np.testing.assert_allclose(np.mean(x, axis=(1, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(np.std(x, axis=(1, 2, 3)), 1, atol=1e-5)


def test_a_training_image_does_not_depend_on_its_batch() -> None:
    images, labels, keys = random_images(50), tf.range(50, dtype=tf.int64), keys_of(50)
    together = Cifar10().augment(images, labels, keys)[0].numpy()
    for indices in ([7], [49, 0, 4], list(range(1, 50))):
        alone, _ = Cifar10().augment(images[indices], tf.gather(labels, indices), tf.gather(keys, indices))
        np.testing.assert_array_equal(alone, together[indices])


def test_evaluation_images_are_tensorflow_s_middle_standardised() -> None:
    images = random_images(1_003)  # more than are prepared at once
    middle = tf.image.resize_with_crop_or_pad(images, CROP_SIZE, CROP_SIZE)
    expected = tf.image.per_image_standardization(tf.cast(middle, tf.float32))
    prepared = prepare_for_evaluation(images)
    assert prepared.dtype == np.float32
    np.testing.assert_allclose(prepared, expected, atol=1e-5)


@pytest.mark.parametrize("synthetic", [False, True])
def test_evaluation_batches_look_like_training_batches(tmp_path: Path, synthetic: bool) -> None:
    for name in FILES:
        (tmp_path / name).write_bytes(bytes(3 * RECORD_BYTES))
    sources = Cifar10().create_sources(tmp_path, synthetic=synthetic)
    assert sources.evaluation is not None
    assert isinstance(sources.train, ArraySource)
    assert (sources.train.num_samples, sources.evaluation.num_samples) == ((12_800, 1_280) if synthetic else (15, 3))
    indices = tf.constant([2, 0], tf.int64)
    raw, raw_labels = sources.train.gather(indices)
    train = Cifar10().augment(raw, raw_labels, keys_of(2))
    for trained, evaluated in zip(train, sources.evaluation.gather(indices), strict=True):
        assert (trained.shape, trained.dtype) == (evaluated.shape, evaluated.dtype)
    assert raw.dtype == tf.uint8


def test_images_are_stretched_to_be_looked_at() -> None:
    images = np.stack([np.linspace(-3, 5, 12, dtype=np.float32), np.full(12, 7, np.float32)]).reshape(2, 2, 2, 3)
    shown = rescale(images)
    assert (shown[0].min(), shown[0].max()) == (0, 1)
    assert (shown[1] == 0).all()


def test_summaries_show_images_kernels_and_feature_maps() -> None:
    model, images = Cifar10().create_model(), prepare_for_evaluation(random_images(3))
    summaries = Cifar10().summaries(model, tf.constant(images), tf.range(3))
    shapes = {name: summary.values.shape for name, summary in summaries.items()}
    assert shapes == {
        "images": (3, 24, 24, 3),
        "kernels/conv1": (5, 5, 3, 64),
        "kernels/conv2": (5, 5, 64, 64),
        "kernels/local3": (2304, 384),
        "kernels/local4": (384, 192),
        "kernels/softmax_linear": (192, 10),
        "activations/conv1": (3, 24, 24, 64),
        "activations/conv2": (3, 12, 12, 64),
    }
    np.testing.assert_array_equal(summaries["activations/conv1"].values, model.get_layer("conv1")(images))
