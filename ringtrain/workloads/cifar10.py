"""cifar10: network and recipe of TensorFlow's CIFAR-10 tutorial (tensorflow/models, tutorials/image/cifar10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringtrain.data.formats.cifar10 import IMAGE_SIZE, NUM_CLASSES, Samples, load_cifar10
from ringtrain.data.sources import from_arrays
from ringtrain.workloads.base import Classifier, Histogram, Images, Sources

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

CROP_SIZE = 24
MAX_BRIGHTNESS_DELTA = 63.0  # for pixels 0 to 255
CONTRAST_RANGE = (0.2, 1.8)
WEIGHT_DECAY = 0.004  # of tf.nn.l2_loss, half the sum of squares
NUM_SYNTHETIC = (12_800, 1_280)  # training, evaluation
_EVALUATION_CHUNK = 1_000


class Cifar10(Classifier):
    """Two convolutions with local response normalisation and three dense layers, on random 24x24 crops."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "batch_size": 128,
        "epochs": 256,
        "optimizer": {
            "name": "sgd",
            "lr": 0.1,
            "schedule": "exponential",
            "decay_rate": 0.1,
            "decay_epochs": 350,
            "ema": 0.9999,
        },
        "best_metric": "accuracy",
        "best_direction": "max",
    }

    def create_model(self) -> keras.Model:
        import keras
        from keras import layers

        from ringtrain.workloads.response_normalization import LocalResponseNormalization

        normalization: dict[str, Any] = {"depth_radius": 4, "bias": 1.0, "alpha": 0.001 / 9, "beta": 0.75}
        return keras.Sequential(
            [
                keras.Input((CROP_SIZE, CROP_SIZE, 3)),
                layers.Conv2D(64, 5, padding="same", activation="relu", name="conv1", **initial(stddev=5e-2, bias=0.0)),
                layers.MaxPooling2D(3, 2, padding="same", name="pool1"),  # [n, 12, 12, 64]
                LocalResponseNormalization(name="norm1", **normalization),
                layers.Conv2D(64, 5, padding="same", activation="relu", name="conv2", **initial(stddev=5e-2, bias=0.1)),
                LocalResponseNormalization(name="norm2", **normalization),
                layers.MaxPooling2D(3, 2, padding="same", name="pool2"),  # [n, 6, 6, 64]
                layers.Flatten(),
                layers.Dense(384, activation="relu", name="local3", **initial(stddev=0.04, bias=0.1), **weight_decay()),
                layers.Dense(192, activation="relu", name="local4", **initial(stddev=0.04, bias=0.1), **weight_decay()),
                layers.Dense(NUM_CLASSES, name="softmax_linear", **initial(stddev=1 / 192, bias=0.0)),
            ],
            name="cifar10",
        )

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        train, (images, labels) = _read_samples(data_dir, synthetic=synthetic)
        return Sources(from_arrays(*train), from_arrays(prepare_for_evaluation(images), labels))

    def augment(self, x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """uint8 [n, 32, 32, 3] -> standardised float32 [n, 24, 24, 3]."""
        import tensorflow as tf

        from ringtrain.data import augment

        x = augment.random_crop(x, keys, CROP_SIZE, CROP_SIZE, draw=0)
        x = augment.random_flip_left_right(x, keys, draw=1)
        x = augment.random_brightness(tf.cast(x, tf.float32), keys, MAX_BRIGHTNESS_DELTA, draw=2)
        x = augment.random_contrast(x, keys, *CONTRAST_RANGE, draw=3)
        return augment.per_image_standardization(x), y

    def summaries(self, model: keras.Model, x: tf.Tensor, y: tf.Tensor) -> dict[str, Images | Histogram]:
        import keras

        convolutions = ("conv1", "conv2")
        inner = keras.Model(model.inputs, [model.get_layer(name).output for name in convolutions])
        return {
            "images": Images(rescale(np.asarray(x, np.float32))),
            **trained_kernels(model),
            **{
                f"activations/{name}": Histogram(np.asarray(values, np.float32))
                for name, values in zip(convolutions, inner(x, training=False), strict=True)
            },
        }


def trained_kernels(model: keras.Model) -> dict[str, Histogram]:
    layers = [layer for layer in model.layers if layer.trainable and hasattr(layer, "kernel")]
    return {f"kernels/{layer.name}": Histogram(np.asarray(layer.kernel, np.float32)) for layer in layers}


def initial(*, stddev: float, bias: float) -> dict[str, Any]:
    """Truncated at two standard deviations."""
    from keras import initializers

    return {
        "kernel_initializer": initializers.TruncatedNormal(stddev=stddev),
        "bias_initializer": initializers.Constant(bias),
    }


def weight_decay() -> dict[str, Any]:
    """``WEIGHT_DECAY * tf.nn.l2_loss(kernel)``; Keras' L2 lacks the factor 1/2."""
    from keras import regularizers

    return {"kernel_regularizer": regularizers.L2(WEIGHT_DECAY / 2)}


def prepare_for_evaluation(images: np.ndarray) -> np.ndarray:
    """Central crops: uint8 [n, 32, 32, 3] -> standardised float32 [n, 24, 24, 3]."""
    import tensorflow as tf

    from ringtrain.data.augment import per_image_standardization

    start, end = (IMAGE_SIZE - CROP_SIZE) // 2, (IMAGE_SIZE + CROP_SIZE) // 2
    prepared = np.empty((len(images), CROP_SIZE, CROP_SIZE, 3), np.float32)
    with tf.device("CPU"):
        for first in range(0, len(images), _EVALUATION_CHUNK):  # limits temporary memory
            chunk = slice(first, first + _EVALUATION_CHUNK)
            prepared[chunk] = per_image_standardization(tf.cast(images[chunk, start:end, start:end], tf.float32))
    return prepared


def read_sources(data_dir: Path | None, *, synthetic: bool) -> Sources:
    return Sources(*(from_arrays(*samples) for samples in _read_samples(data_dir, synthetic=synthetic)))


def _read_samples(data_dir: Path | None, *, synthetic: bool) -> Sequence[Samples]:
    return make_samples(NUM_SYNTHETIC, IMAGE_SIZE, NUM_CLASSES) if synthetic else load_cifar10(data_dir)


def make_samples(counts: Sequence[int], image_size: int, num_classes: int) -> list[Samples]:
    """Random images uint8 [n, h, w, 3] and labels; ``counts``: training, evaluation."""
    samples = []
    for part, count in enumerate(counts):
        generator = np.random.default_rng(part)
        images = generator.integers(0, 256, (count, image_size, image_size, 3), np.uint8)
        samples.append((images, generator.integers(0, num_classes, count)))
    return samples


def rescale(images: np.ndarray) -> np.ndarray:
    """Stretch each image [n, h, w, c] to [0, 1]."""
    low = images.min(axis=(1, 2, 3), keepdims=True)
    high = images.max(axis=(1, 2, 3), keepdims=True)
    return (images - low) / np.maximum(high - low, np.finfo(images.dtype).tiny)
