"""The workload autoencoder: a network for images of any size, and what TensorBoard shows of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.data.formats.cifar10 import FILES
from ringtrain.errors import UsageError
from ringtrain.workloads import create_workload, load_workload
from ringtrain.workloads.autoencoder import Autoencoder, ImagesOf, choose_levels, create_autoencoder
from ringtrain.workloads.base import Histogram, Images


def autoencoder(**options: Any) -> Autoencoder:
    workload = create_workload(Autoencoder, {**Autoencoder.options, **options})
    assert isinstance(workload, Autoencoder)
    return workload


def random_images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, np.float32)


@pytest.fixture
def half_precision() -> Iterator[None]:
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


def test_data_width_and_gradients_are_options() -> None:
    assert load_workload("autoencoder").options == {"data": "cifar10", "width": 64, "gradients": False}


# --- The network ---


@pytest.mark.parametrize(
    ("height", "width", "levels"),
    [(1, 1, 0), (2, 9, 0), (3, 3, 1), (4, 4, 1), (5, 5, 2), (8, 8, 2), (28, 28, 4), (32, 32, 4), (64, 7, 2),
     (224, 224, 5), (2048, 2048, 5)],
)  # fmt: skip
def test_the_depth_follows_from_the_shorter_side(height: int, width: int, levels: int) -> None:
    assert choose_levels(height, width) == choose_levels(width, height) == levels


def test_cifar10_s_network_doubles_the_channels_and_comes_back() -> None:
    model = load_workload("autoencoder")().create_model()
    assert [(layer.name, layer.output.shape[1:]) for layer in model.layers[1:]] == [
        ("encoder1", (16, 16, 64)),
        ("encoder2", (8, 8, 128)),
        ("encoder3", (4, 4, 256)),
        ("encoder4", (2, 2, 512)),
        ("decoder4", (4, 4, 256)),
        ("decoder3", (8, 8, 128)),
        ("decoder2", (16, 16, 64)),
        ("decoder1", (32, 32, 3)),
    ]
    for layer in model.layers[1:]:
        kind = keras.layers.Conv2D if layer.name.startswith("encoder") else keras.layers.Conv2DTranspose
        assert type(layer) is kind
        assert (layer.kernel_size, layer.strides) == ((3, 3), (2, 2))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (3, 3), (7, 12), (8, 8), (33, 31), (64, 64), (75, 100)])
def test_outputs_have_the_size_of_the_inputs(size: tuple[int, int], channels: int) -> None:
    model = create_autoencoder((*size, channels), width=2)
    images = random_images(2, *size, channels)
    outputs = np.asarray(model(images))
    assert outputs.shape == images.shape
    assert ((outputs > 0) & (outputs < 1)).all()


@pytest.mark.parametrize(
    ("side", "pixels"), [(9, [(0, 0), (8, 8), (8, 0)]), (8, [(7, 7), (3, 7)]), (5, [(4, 0), (4, 4)])]
)
def test_a_pixel_returns_to_its_position(side: int, pixels: list[tuple[int, int]]) -> None:
    """Through windows that see their middle alone; those are at the pixels which are tried."""
    model = create_autoencoder((side, side, 1), width=1)
    for layer in model.layers:
        for weight in layer.weights:
            values = np.zeros(weight.shape, np.float32)
            if values.ndim == 4:
                values[1, 1, 0, 0] = 1  # the first channel alone
            weight.assign(values)
    for row, column in pixels:
        image = np.zeros((1, side, side, 1), np.float32)
        image[0, row, column] = 1
        outputs = np.asarray(model(image))[0, :, :, 0]
        assert np.argwhere(outputs > 0.5).tolist() == [[row, column]]


def test_a_width_of_zero_is_refused() -> None:
    with pytest.raises(UsageError, match=r"options\.width is 0; it must be at least 1"):
        autoencoder(width=0).create_model()


# --- Data and loss ---


def test_bytes_become_numbers_from_0_to_1_in_and_out(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_bytes(bytes([0, *[255] * 1024, *[51] * 1024, *[0] * 1024]) * 2)
    sources = autoencoder().create_sources(tmp_path, synthetic=False)
    assert isinstance(sources.train, ImagesOf)
    assert isinstance(sources.evaluation, ImagesOf)
    assert (sources.train.num_samples, sources.evaluation.num_samples) == (10, 2)
    for source in (sources.train, sources.evaluation):
        x, y = tf.function(source.gather)(tf.constant([1, 0], tf.int64))
        assert (x.shape, x.dtype) == ((2, 32, 32, 3), tf.float32)
        np.testing.assert_allclose(x[0, 5, 7], [1, 0.2, 0], rtol=1e-6)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("data", ["cifar10", "digits"])
def test_synthetic_data_have_the_format_of_real_data(data: str) -> None:
    workload = autoencoder(data=data, width=2)
    sources = workload.create_sources(None, synthetic=True)
    assert isinstance(sources.train, ImagesOf)
    x, y = sources.train.gather(tf.constant([3, 1], tf.int64))
    assert x.dtype == tf.float32
    assert np.min(x) >= 0
    assert np.max(x) <= 1
    assert workload.create_model()(x).shape == x.shape == y.shape


def test_unknown_data_are_refused_with_the_names_that_there_are() -> None:
    for call in (
        autoencoder(data="mnist").create_model,
        lambda: autoencoder(data="mnist").create_sources(None, synthetic=True),
    ):
        with pytest.raises(UsageError, match=r"options\.data is 'mnist'; it must be one of cifar10, digits"):
            call()


def test_the_loss_is_each_image_s_mean_squared_error() -> None:
    images, outputs = random_images(3, 4, 5, 2), random_images(3, 4, 5, 2)[::-1]
    losses = autoencoder().loss(tf.constant(images), tf.constant(outputs.copy()))
    np.testing.assert_allclose(losses, ((images - outputs) ** 2).reshape(3, -1).mean(axis=1), rtol=1e-6)


def test_summaries_of_half_precision_are_float32(half_precision: None) -> None:
    workload = autoencoder(data="digits", width=2)
    images = random_images(2, 8, 8, 1)
    summaries = workload.summaries(workload.create_model(), images, images)
    assert summaries["images"].values.dtype == np.float32


# --- What TensorBoard shows ---

LAYERS = ("encoder1", "encoder2", "decoder2", "decoder1")


def test_summaries_show_each_image_beside_its_reconstruction() -> None:
    workload = autoencoder(data="digits", width=2)
    model, images = workload.create_model(), random_images(3, 8, 8, 1)
    shown = workload.summaries(model, tf.constant(images), tf.constant(images))["images"]
    assert isinstance(shown, Images)
    assert shown.values.shape == (3, 8, 16, 1)
    np.testing.assert_array_equal(shown.values[:, :, :8], images)
    np.testing.assert_allclose(shown.values[:, :, 8:], model(images), rtol=1e-6)


@pytest.mark.parametrize("gradients", [False, True])
def test_summaries_show_histograms_of_weights_and_activations(gradients: bool) -> None:
    workload = autoencoder(data="digits", width=2, gradients=gradients)
    model, images = workload.create_model(), random_images(3, 8, 8, 1)
    summaries = workload.summaries(model, tf.constant(images), tf.constant(images))
    weights = {f"{kind}/{layer}" for kind in ("weights", "biases") for layer in LAYERS}
    activations = {f"activations/{layer}" for layer in LAYERS}
    assert set(summaries) == {"images", *weights, *activations, *(f"gradients/{tag}" for tag in weights if gradients)}
    assert all(isinstance(value, Histogram) for tag, value in summaries.items() if tag != "images")
    np.testing.assert_array_equal(summaries["weights/decoder2"].values, model.get_layer("decoder2").kernel)
    np.testing.assert_array_equal(summaries["biases/encoder1"].values, model.get_layer("encoder1").bias)
    np.testing.assert_allclose(summaries["activations/encoder1"].values, model.get_layer("encoder1")(images), rtol=1e-6)


def test_gradients_are_those_of_the_samples_mean_loss() -> None:
    workload = autoencoder(data="digits", width=2, gradients=True)
    model, images = workload.create_model(), tf.constant(random_images(3, 8, 8, 1))
    shown = workload.summaries(model, images, images)
    bias = model.get_layer("decoder1").bias
    before, step = float(bias.numpy()[0]), 1e-2

    def loss(value: float) -> float:
        bias.assign([value])
        return float(tf.reduce_mean(tf.square(model(images) - images)))

    slope = (loss(before + step) - loss(before - step)) / (2 * step)
    assert shown["gradients/biases/decoder1"].values[0] == pytest.approx(slope, rel=1e-2)
    assert shown["gradients/weights/encoder1"].values.shape == model.get_layer("encoder1").kernel.shape
