"""The workload cifar10_resnet: its recipe, what happens to the images, and what its evaluation averages."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.config import make_config
from ringtrain.data.formats.cifar10 import FILES, RECORD_BYTES
from ringtrain.data.sources import ArraySource, from_arrays
from ringtrain.training.plan import plan_steps
from ringtrain.workloads import cifar10_resnet, create_workload, load_workload
from ringtrain.workloads.cifar10_resnet import MAX_SHIFT, Cifar10Resnet, create_network, patch_axes
from tests.unit.images import keys_of, random_images


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return create_workload(Cifar10Resnet, {"width": 4}).create_model()


def test_the_width_is_an_option() -> None:
    assert load_workload("cifar10_resnet").options == {"width": 64}


# --- The recipe ---


def rates(**explicit: Any) -> tuple[int, list[float]]:
    """Steps an epoch, and the learning rate at every epoch's beginning, on 50,000 samples."""
    config = make_config(explicit, Cifar10Resnet.defaults, Cifar10Resnet.options)
    batch = config.global_batch_size
    assert batch is not None
    plan = plan_steps(Cifar10Resnet(), config, from_arrays(np.zeros(50_000), np.zeros(50_000)), batch)
    ends = range(0, plan.total_steps + 1, plan.order.steps_per_epoch)
    return plan.order.steps_per_epoch, [plan.learning_rate(plan.order.samples_before(step)) for step in ends]


def test_the_learning_rate_is_a_triangle_that_ends_with_the_run() -> None:
    steps_per_epoch, by_epoch = rates()
    assert steps_per_epoch == 98
    assert by_epoch == pytest.approx([0, 0.375, *(0.75 * left / 14 for left in range(14, -1, -1))])
    assert rates(epochs=4)[1] == pytest.approx([0, 0.375, 0.75, 0.375, 0])


def test_the_learning_rate_belongs_to_the_recipe_s_global_batch() -> None:
    linear = {"optimizer": {"lr_scale": "linear", "warmup_epochs": 0.0}}
    assert rates(**linear)[1][0] == pytest.approx(0.75)
    assert rates(**linear, global_batch_size=1024)[1][0] == pytest.approx(1.5)


def test_the_recipe_holds_the_global_batch_and_the_optimizer() -> None:
    config = make_config({}, Cifar10Resnet.defaults, Cifar10Resnet.options)
    assert (config.global_batch_size, config.batch_size, config.epochs) == (512, None, 16)
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.momentum, optimizer.nesterov) == ("sgd", 0.85, True)
    assert (optimizer.schedule, optimizer.weight_decay, optimizer.lr_scale) == ("linear", 0.009, "none")
    assert make_config({"batch_size": 64}, Cifar10Resnet.defaults, {}).global_batch_size is None


def test_the_loss_smooths_labels_by_one_fifth() -> None:
    logits, labels = np.random.default_rng(0).normal(0, 2, (3, 10)).astype(np.float32), np.array([0, 9, 4])
    expected = np.full((3, 10), 0.02) + 0.8 * np.eye(10)[labels]
    log_softmax = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    losses = Cifar10Resnet().loss(tf.constant(labels), tf.constant(logits))
    np.testing.assert_allclose(losses, -(expected * log_softmax).sum(axis=1), rtol=1e-5)


# --- The network ---


def test_the_network_has_three_halving_residual_blocks() -> None:
    network = create_network(64)
    convolutions = [layer for layer in network.layers if isinstance(layer, keras.layers.Conv2D)]
    assert [(layer.name, layer.output.shape[1:], layer.trainable) for layer in convolutions] == [
        ("whitening", (31, 31, 24), False),
        ("block1_conv1", (31, 31, 64), True),
        ("block1_conv2", (15, 15, 64), True),
        ("block2_conv1", (15, 15, 256), True),
        ("block2_conv2", (7, 7, 256), True),
        ("block3_conv1", (7, 7, 256), True),
        ("block3_conv2", (3, 3, 256), True),
    ]
    assert sum(isinstance(layer, keras.layers.Add) for layer in network.layers) == 3
    assert network.count_params() == 1_973_920
    assert network.output.shape == (None, 10)


def test_normalisation_is_over_the_ranks(model: keras.Model) -> None:
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert [type(layer).__name__ for layer in norms] == ["SyncBatchNormalization"] * 6


def test_the_axes_of_patches_are_orthogonal_and_of_length_1() -> None:
    axes = patch_axes().reshape(12, 12)
    np.testing.assert_allclose(axes @ axes.T, np.eye(12), atol=1e-12)


def test_the_first_layer_centres_and_whitens_bytes(model: keras.Model) -> None:
    """A patch that lies off the mean by one deviation along an axis gives 1 in that filter, and nothing in others."""
    deviation, axis = 0.159, patch_axes()[1, 0]  # upper half brighter than the lower
    patch = np.array(cifar10_resnet.CHANNEL_MEANS) + deviation * axis
    outputs = keras.Model(model.input, model.get_layer("whitening").output)(
        np.round(255 * np.tile(patch, (1, 16, 16, 1)))
    )
    first = np.asarray(outputs)[0, 0, 0]
    expected = np.zeros(24)
    expected[3], expected[15] = 1, -1
    np.testing.assert_allclose(first[[0, 1, 2, 3, 6, 9, 12, 15]], expected[[0, 1, 2, 3, 6, 9, 12, 15]], atol=0.05)
    assert cifar10_resnet.whitening_kernel().shape == (2, 2, 3, 24)


def test_only_evaluation_averages_an_image_and_its_mirror_image(model: keras.Model) -> None:
    images = random_images(4)
    mirrored = np.ascontiguousarray(images[:, :, ::-1])
    plain = keras.Model(model.input, model.output)  # the same layers, as a functional model calls them
    expected = (plain(images, training=False) + plain(mirrored, training=False)) / 2
    np.testing.assert_allclose(model(images, training=False), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model(mirrored), model(images), rtol=1e-5, atol=1e-6)
    assert np.abs(plain(images) - plain(mirrored)).max() > 1e-4
    np.testing.assert_allclose(model(images, training=True), plain(images, training=True), rtol=1e-5, atol=1e-6)
    assert np.abs(model(images, training=True) - model(mirrored, training=True)).max() > 1e-4


def test_the_model_is_saved_and_loaded(model: keras.Model, tmp_path: Path) -> None:
    images = random_images(2)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(images), model(images))


def test_float64_runs(float64: None) -> None:
    network = create_network(2)
    with tf.GradientTape() as tape:
        losses = Cifar10Resnet().loss(tf.range(4, dtype=tf.int64), network(random_images(4), training=True))
        objective = tf.reduce_sum(losses)
    gradients = tape.gradient(objective, [variable.value for variable in network.trainable_variables])
    assert {gradient.dtype for gradient in gradients} == {losses.dtype} == {tf.float64}
    assert len(gradients) == 6 + 6 + 1  # convolutions, normalisations' biases, logits


# --- The images ---


def test_training_images_are_flipped_and_shifted_with_reflection() -> None:
    images = random_images(600)
    x, y = tf.function(Cifar10Resnet().augment, autograph=False)(images, tf.range(600, dtype=tf.int64), keys_of(600))
    assert (x.shape, x.dtype) == (images.shape, tf.uint8)
    np.testing.assert_array_equal(y, np.arange(600))
    found = [place_of(np.asarray(x)[number], images[number]) for number in range(600)]
    places = range(2 * MAX_SHIFT + 1)
    assert set(found) == {(row, column, flipped) for row in places for column in places for flipped in (False, True)}


def place_of(image: np.ndarray, original: np.ndarray) -> tuple[int, int, bool]:
    """Where the window that became this image lay, and whether it was flipped."""
    padded = np.pad(original, [(MAX_SHIFT, MAX_SHIFT), (MAX_SHIFT, MAX_SHIFT), (0, 0)], mode="reflect")
    [place] = [
        (row, column, flipped)
        for row in range(2 * MAX_SHIFT + 1)
        for column in range(2 * MAX_SHIFT + 1)
        for flipped in (False, True)
        if (padded[row : row + 32, column : column + 32][:, :: -1 if flipped else 1] == image).all()
    ]
    return place


@pytest.mark.parametrize("synthetic", [False, True])
def test_evaluation_batches_look_like_training_batches(tmp_path: Path, synthetic: bool) -> None:
    for name in FILES:
        (tmp_path / name).write_bytes(bytes(3 * RECORD_BYTES))
    workload = load_workload("cifar10_resnet")()
    sources = workload.create_sources(tmp_path, synthetic=synthetic)
    assert isinstance(sources.train, ArraySource)
    assert sources.evaluation is not None
    assert (sources.train.num_samples, sources.evaluation.num_samples) == ((12_800, 1_280) if synthetic else (15, 3))
    indices = tf.constant([2, 0], tf.int64)
    x, y = sources.train.gather(indices)
    train = workload.augment(x, y, keys_of(2))
    for trained, evaluated in zip(train, sources.evaluation.gather(indices), strict=True):
        assert (trained.shape, trained.dtype) == (evaluated.shape, evaluated.dtype)


def test_summaries_show_the_images_and_the_trained_kernels(model: keras.Model) -> None:
    images = random_images(2)
    summaries = Cifar10Resnet().summaries(model, tf.constant(images), tf.range(2))
    kernels = {f"kernels/block{block}_conv{number}" for block in (1, 2, 3) for number in (1, 2)}
    assert set(summaries) == {"images", "kernels/logits", *kernels}
    np.testing.assert_allclose(summaries["images"].values, images / np.float32(255), rtol=1e-6)


def test_the_logits_begin_soft(model: keras.Model) -> None:
    plain = keras.Model(model.input, model.get_layer("logits").output)
    images = random_images(2)
    np.testing.assert_allclose(
        model(images, training=True), cifar10_resnet.LOGIT_SCALE * plain(images, training=True), rtol=1e-5
    )
