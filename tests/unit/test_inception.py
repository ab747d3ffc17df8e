"""The workload inception: the paper's network with its auxiliary classifier, its loss and its optimizer."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.config import make_config
from ringtrain.data.augment import sample_keys
from ringtrain.data.formats.image_folder import ImageFolderSource
from ringtrain.data.sources import ArraySource
from ringtrain.errors import DataError, UsageError
from ringtrain.step.schedule import LearningRate
from ringtrain.training.creation import create_optimizer
from ringtrain.workloads import create_workload, inception, load_workload
from ringtrain.workloads.inception import Inception, add_auxiliary_classifier, build_inception


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return build_inception((75, 75, 3), 7)


def make_inception(**options: Any) -> Inception:
    workload = create_workload(Inception, {**Inception.options, **options})
    assert isinstance(workload, Inception)
    return workload


def write_images(folder: Path, height: int, width: int, *, classes: int = 2) -> None:
    image = tf.io.encode_png(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)).numpy()
    for part in ("train", "val"):
        for number in range(classes):
            (folder / part / f"class{number}").mkdir(parents=True)
            (folder / part / f"class{number}" / "1.png").write_bytes(image)


def test_the_recipe_has_100_epochs() -> None:
    assert load_workload("inception").defaults["epochs"] == 100


# --- The network ---


def test_the_network_is_the_paper_s(model: keras.Model) -> None:
    published = keras.applications.InceptionV3(include_top=True, weights=None, classes=7)
    kernels = sorted(tuple(v.shape) for v in published.trainable_variables)
    auxiliary = [v for v in model.trainable_variables if "auxiliary" in v.path]
    main = [v for v in model.trainable_variables if "auxiliary" not in v.path]
    assert sorted(tuple(v.shape) for v in main) == kernels
    assert [tuple(v.shape) for v in auxiliary] == [(1, 1, 768, 128), (128,), (1, 1, 128, 768), (768,), (768, 7), (7,)]


@pytest.mark.parametrize(
    ("grid", "pooled", "kernel"),
    [
        ((3, 3), (1, 1), (1, 1)),
        ((7, 7), (1, 1), (1, 1)),
        ((3, 17), (1, 5), (1, 5)),
        ((17, 17), (5, 5), (5, 5)),
        ((25, 25), (7, 7), (5, 5)),
    ],
    ids=["75", "139", "75x299", "299", "427"],
)
def test_the_auxiliary_classifier_fits_every_grid_size(
    grid: tuple[int, int], pooled: tuple[int, int], kernel: tuple[int, int]
) -> None:
    features = keras.Input((*grid, 768))
    classifier = keras.Model(features, add_auxiliary_classifier(features, 5))
    assert classifier.get_layer("auxiliary_pool").output.shape == (None, *pooled, 768)
    assert classifier.get_layer("auxiliary_convolution").kernel.shape == (*kernel, 128, 768)
    assert classifier.output.shape == (None, 5)


@pytest.mark.parametrize(("size", "grid"), [(75, 3), pytest.param(139, 7, marks=pytest.mark.slow)])
def test_both_classifiers_give_logits_that_depend_on_the_image(model: keras.Model, size: int, grid: int) -> None:
    if size != model.input.shape[1]:
        model = build_inception((size, size, 3), 7)
    outputs = model(np.random.default_rng(0).integers(0, 256, (2, size, size, 3), np.uint8), training=True)
    assert model.get_layer("mixed7").output.shape == (None, grid, grid, 768)
    assert set(outputs) == {"main", "auxiliary"}
    for logits in outputs.values():
        assert logits.shape == (2, 7)
        assert logits.dtype == tf.float32
        assert not np.allclose(logits[0], logits[1], rtol=1e-4)


def test_pixels_become_minus_one_to_one(model: keras.Model) -> None:
    scale = model.get_layer("rescaling")
    np.testing.assert_allclose(scale(np.array([0, 255], np.uint8)), [-1, 1], rtol=1e-6)
    assert scale.input is model.input
    assert model.input.dtype == "uint8"


def test_weight_decay_is_half_the_sum_of_squares_of_every_kernel(model: keras.Model) -> None:
    kernels = [v for v in model.trainable_variables if v.path.endswith("/kernel")]
    assert len(kernels) == 94 + 1 + 2 + 1  # the body's, main, the auxiliary convolutions', auxiliary
    expected = 0.00004 * sum(np.square(np.asarray(v, np.float64)).sum() / 2 for v in kernels)
    assert float(sum(model.losses)) == pytest.approx(expected, rel=1e-5)
    by_variable = sum(float(v.regularizer(v)) for v in model.trainable_variables if v.regularizer)
    assert by_variable == pytest.approx(expected, rel=1e-5)


def test_the_model_is_saved_and_loaded_with_its_weight_decay(model: keras.Model, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (1, 75, 75, 3), np.uint8)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(images)["main"], model(images)["main"])
    assert float(sum(loaded.losses)) == pytest.approx(float(sum(model.losses)), rel=1e-6)


# --- Loss, metrics, optimizer ---


def cross_entropy(label: int, logits: np.ndarray) -> float:
    """With a tenth of the label spread over all classes, in float64."""
    targets = np.full(len(logits), 0.1 / len(logits))
    targets[label] += 0.9
    return float(-(targets * (logits - np.log(np.exp(logits).sum()))).sum())


def test_the_loss_covers_both_classifiers_with_smoothed_labels() -> None:
    generator = np.random.default_rng(0)
    labels = np.array([2, 0, 3])
    main, auxiliary = generator.normal(0, 3, (3, 4)), generator.normal(0, 3, (3, 4))
    outputs = {"main": tf.constant(main), "auxiliary": tf.constant(auxiliary)}
    losses = Inception().loss(tf.constant(labels), outputs)
    expected = [
        cross_entropy(label, main[row]) + 0.4 * cross_entropy(label, auxiliary[row]) for row, label in enumerate(labels)
    ]
    assert losses.dtype == tf.float64
    np.testing.assert_allclose(losses, expected, rtol=1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_metrics_are_of_the_main_classifier_alone(dtype: type) -> None:
    main: np.ndarray = np.array([[9, 8, 7, 6, 5, 4, 0], [4, 9, 8, 7, 6, 5, 0], [3, 9, 8, 7, 6, 5, 0]], dtype)
    outputs = {"main": tf.constant(main), "auxiliary": tf.zeros(main.shape, dtype)}
    metrics = Inception().metrics(tf.constant([0, 5, 0]), outputs)
    assert {name: list(np.asarray(values)) for name, values in metrics.items()} == {
        "accuracy": [1, 0, 0],
        "top5_accuracy": [1, 1, 0],
    }


def test_fewer_than_five_classes_have_metrics_as_well() -> None:
    outputs = {name: tf.constant([[1.0, 2.0], [1.0, 0.0]]) for name in ("main", "auxiliary")}
    metrics = Inception().metrics(tf.constant([0, 0]), outputs)
    assert np.asarray(metrics["accuracy"]).tolist() == [0, 1]
    assert np.asarray(metrics["top5_accuracy"]).tolist() == [1, 1]


def paper_s_optimizer() -> keras.optimizers.Optimizer:
    return create_optimizer(make_config({}, Inception.defaults, Inception.options).optimizer)


def test_the_optimizer_is_the_paper_s() -> None:
    settings = paper_s_optimizer().get_config()
    expected = {"learning_rate": 0.045, "rho": 0.9, "epsilon": 1.0, "momentum": 0.0, "global_clipnorm": 2.0}
    assert {name: settings[name] for name in expected} == {
        name: pytest.approx(value) for name, value in expected.items()
    }
    assert not settings["centered"]


def test_the_optimizer_adds_epsilon_one_inside_the_root() -> None:
    optimizer = paper_s_optimizer()
    variable = keras.Variable([1.0, 2.0])
    optimizer.build([variable])
    optimizer.apply([tf.constant([3.0, 4.0])], [variable])  # norm 5, clipped to 2
    gradient = np.array([3.0, 4.0]) * 2 / 5
    np.testing.assert_allclose(variable, [1, 2] - 0.045 * gradient / np.sqrt(0.1 * gradient**2 + 1), rtol=1e-6)


def test_the_learning_rate_decays_every_two_epochs() -> None:
    config = make_config({}, Inception.defaults, Inception.options)
    rate = LearningRate(
        optimizer=config.optimizer, batch_ratio=1, samples_per_epoch=100, total_samples=100 * (config.epochs or 0)
    )
    rates = [rate(samples) for samples in (0, 199, 200, 400)]
    np.testing.assert_allclose(rates, [0.045, 0.045, 0.045 * 0.94, 0.045 * 0.94**2])


def test_float64_runs(float64: None) -> None:
    outputs = build_inception((75, 75, 3), 3)(np.zeros((2, 75, 75, 3), np.uint8), training=False)
    assert {name: logits.dtype for name, logits in outputs.items()} == {"main": tf.float64, "auxiliary": tf.float64}
    assert Inception().loss(tf.constant([0, 2]), outputs).dtype == tf.float64


# --- The data ---


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """For what image shapes and classes networks were built, in place of building them."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(inception, "build_inception", lambda *arguments: calls.append(arguments))
    return calls


def test_image_size_and_classes_come_from_the_folder(tmp_path: Path, built: list[tuple[Any, ...]]) -> None:
    write_images(tmp_path, 76, 80, classes=3)
    workload = make_inception()
    sources = workload.create_sources(tmp_path, synthetic=False)
    assert sources.evaluation is not None
    assert isinstance(sources.train, ImageFolderSource)
    assert (sources.train.num_samples, sources.evaluation.num_samples) == (3, 3)
    workload.create_model()
    assert built == [((76, 80, 3), 3)]


def test_images_are_resized_on_demand(tmp_path: Path, built: list[tuple[Any, ...]]) -> None:
    write_images(tmp_path, 32, 40)
    workload = make_inception(image_size=80)
    source = workload.create_sources(tmp_path, synthetic=False).train
    assert isinstance(source, ImageFolderSource)
    images, labels = source.gather(tf.constant([1, 0], tf.int64))
    assert (images.shape, images.dtype) == ((2, 80, 80, 3), tf.uint8)
    assert labels.numpy().tolist() == [1, 0]
    workload.create_model()
    assert built == [((80, 80, 3), 2)]


def test_small_images_are_the_data_s_error(tmp_path: Path) -> None:
    write_images(tmp_path, 100, 74)
    with pytest.raises(DataError, match=r"100x74 pixels, and Inception v3 needs 75 .*--options\.image_size 75"):
        make_inception().create_sources(tmp_path, synthetic=False)
    make_inception(image_size=75).create_sources(tmp_path, synthetic=False)


@pytest.mark.parametrize("value", [74, 0, "large", 99.5, True])
@pytest.mark.parametrize("synthetic", [False, True])
def test_a_wrong_image_size_is_named(tmp_path: Path, value: object, synthetic: bool) -> None:
    with pytest.raises(UsageError, match=f"options.image_size is {value!r}; .* at least 75"):
        make_inception(image_size=value).create_sources(tmp_path, synthetic=synthetic)


def test_a_wrong_number_of_classes_is_named() -> None:
    with pytest.raises(UsageError, match=r"options\.synthetic_classes is 0; it must be at least 1"):
        make_inception(synthetic_classes=0).create_sources(None, synthetic=True)


def test_without_images_the_error_gives_the_remedy() -> None:
    with pytest.raises(UsageError, match=r"--data_dir.*--synthetic true") as caught:
        make_inception().create_sources(None, synthetic=False)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("options", "size", "classes"), [({}, 75, 10), ({"image_size": 80, "synthetic_classes": 3}, 80, 3)]
)
def test_synthetic_data_have_the_format_of_real_data(
    built: list[tuple[Any, ...]], options: dict[str, int], size: int, classes: int
) -> None:
    workload = make_inception(**options)
    sources = workload.create_sources(None, synthetic=True)
    assert sources.evaluation is not None
    assert isinstance(sources.train, ArraySource)
    everything = tf.range(sources.train.num_samples, dtype=tf.int64)
    images, labels = sources.train.gather(everything)
    assert (images.shape[1:], images.dtype) == ((size, size, 3), tf.uint8)
    assert set(labels.numpy()) == set(range(classes))
    evaluated, _ = sources.evaluation.gather(everything[:2])
    assert not np.array_equal(evaluated, images[:2])
    workload.create_model()
    assert built == [((size, size, 3), classes)]


def test_training_images_are_mirrored_and_shifted_each_by_itself() -> None:
    images = np.full((40, 80, 96, 3), 255, np.uint8)
    images[:, :, :48] = 100  # what is left
    labels, keys = tf.range(40), sample_keys(0, tf.constant(0, tf.int64), tf.range(40, dtype=tf.int64))
    augmented, same = Inception().augment(tf.constant(images), labels, keys)
    assert (augmented.shape, augmented.dtype) == (images.shape, tf.uint8)
    np.testing.assert_array_equal(same, labels)
    mirrored = augmented[:, 40, 30, 0].numpy() == 255
    assert 8 < mirrored.sum() < 32
    black = (augmented.numpy() == 0).all(axis=3).mean(axis=(1, 2))
    assert 0 < black.mean() < black.max() <= 1 - (70 / 80) * (86 / 96)  # by 10 pixels each way at most
    alone, _ = Inception().augment(tf.constant(images[5:6]), labels[5:6], keys[5:6])
    np.testing.assert_array_equal(alone[0], augmented[5])


def test_summaries_show_the_images(model: keras.Model) -> None:
    images = np.full((2, 75, 75, 3), 51, np.uint8)
    shown = load_workload("inception")().summaries(model, tf.constant(images), tf.range(2))
    np.testing.assert_allclose(shown["images"].values, 0.2, rtol=1e-6)
