"""cifar10_resnet: a small residual network that reaches 90 % on CIFAR-10 in sixteen epochs.

After Page's "How to Train Your ResNet" (2018) and Jordan's "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024).
Widths and most optimizer settings are Jordan's, for half the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from ringtrain.data.formats.cifar10 import IMAGE_SIZE, NUM_CLASSES
from ringtrain.workloads.base import Classifier, Histogram, Images, Sources
from ringtrain.workloads.cifar10 import read_sources, trained_kernels

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

MAX_SHIFT = 2  # pixels; Jordan: 2 for ten epochs, 4 for longer runs
LABEL_SMOOTHING = 0.2
LOGIT_SCALE = 1 / 9  # Jordan's: a soft initial softmax
BLOCK_WIDTHS = (1, 4, 4)  # times the option ``width``
# CIFAR-10's, for [0, 1]: channel means, and deviations of 2x2 patches along ``patch_axes``.
CHANNEL_MEANS = (0.4914, 0.4822, 0.4465)
PATCH_DEVIATIONS = (
    (0.798, 0.221, 0.102),
    (0.159, 0.0187, 0.0110),
    (0.147, 0.0153, 0.0096),
    (0.0586, 0.0036, 0.0027),
)
LEAST_DEVIATION = 0.005  # smaller variation is camera or JPEG noise: not amplified


class Cifar10Resnet(Classifier):
    """Whitening convolution, three blocks of two convolutions, and a dense layer."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "global_batch_size": 512,
        "epochs": 16,
        "log_every": 49,
        "optimizer": {
            "name": "sgd",
            "lr": 0.75,
            "momentum": 0.85,
            "nesterov": True,
            "weight_decay": 0.009,
            "warmup_epochs": 2.0,
            "schedule": "linear",
            "ema": 0.98,
        },
        "best_metric": "accuracy",
        "best_direction": "max",
    }
    options: ClassVar[Mapping[str, Any]] = {"width": 64}

    def create_model(self) -> keras.Model:
        return create_network(self.options["width"])

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        return read_sources(data_dir, synthetic=synthetic)

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        import keras

        labels = keras.ops.one_hot(y, NUM_CLASSES, dtype=outputs.dtype)
        return keras.losses.categorical_crossentropy(labels, outputs, from_logits=True, label_smoothing=LABEL_SMOOTHING)

    def augment(self, x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Random shifts, with mirrored edges, and flips of [n, 32, 32, 3]; the type is kept."""
        import tensorflow as tf

        from ringtrain.data import augment

        padding = [MAX_SHIFT, MAX_SHIFT]
        x = tf.pad(x, [[0, 0], padding, padding, [0, 0]], mode="REFLECT")
        x = augment.random_crop(x, keys, IMAGE_SIZE, IMAGE_SIZE, draw=0)
        return augment.random_flip_left_right(x, keys, draw=1), y

    def summaries(self, model: keras.Model, x: tf.Tensor, y: tf.Tensor) -> dict[str, Images | Histogram]:
        return {"images": Images(np.asarray(x, np.float32) / 255), **trained_kernels(model)}


def create_network(width: int) -> keras.Model:
    """uint8 images [n, 32, 32, 3] -> logits [n, 10]. Normalisation covers the global batch."""
    import keras
    from keras import layers

    from ringtrain.workloads.mirror_average import MirrorAverage

    images = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3), dtype="uint8")
    # One factor per channel: Keras 3.11 takes a single factor for one channel.
    x = layers.Rescaling([1 / 255] * 3, [-mean for mean in CHANNEL_MEANS], name="centred")(images)
    kernel = whitening_kernel()
    whitening = layers.Conv2D(kernel.shape[-1], kernel.shape[0], use_bias=False, trainable=False, name="whitening")
    x = whitening(x)  # [n, 31, 31, 24]
    whitening.set_weights([kernel])
    x = layers.Activation("gelu")(x)
    for number, factor in enumerate(BLOCK_WIDTHS, start=1):
        x = convolution(x, factor * width, f"block{number}_conv1", pool=True)  # [n, 15, 15], [n, 7, 7], [n, 3, 3]
        x = layers.Add()([x, convolution(x, factor * width, f"block{number}_conv2")])
    x = layers.Flatten()(layers.MaxPooling2D(3)(x))
    logits = layers.Dense(NUM_CLASSES, use_bias=False, name="logits")(x) * LOGIT_SCALE
    return MirrorAverage(images, logits, name="cifar10_resnet")


def convolution(x: Any, channels: int, name: str, *, pool: bool = False) -> Any:
    """Convolution, optional pooling, normalisation over the global batch, GELU. Later convolutions have the scale."""
    from keras import layers

    from ringtrain.collectives.normalization import SyncBatchNormalization

    x = layers.Conv2D(channels, 3, padding="same", use_bias=False, name=name)(x)
    if pool:
        x = layers.MaxPooling2D()(x)  # first, so that the normalisation has a quarter of the work
    x = SyncBatchNormalization(momentum=0.9, scale=False, name=f"{name}_norm")(x)
    return layers.Activation("gelu")(x)


def patch_axes() -> npt.NDArray[np.float64]:
    """Axes of natural 2x2 patches with almost uncorrelated pixels: [4, 3, 2, 2, 3].

    Haar functions times brightness, red-blue and green-magenta, of length 1. On CIFAR-10 correlations are at most 0.1.
    """
    places = np.array([[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]]) / 2
    colours = np.array([[1, 1, 1], [1, 0, -1], [1, -2, 1]]) / np.sqrt([[3], [2], [6]])
    return np.einsum("ap,bc->abpc", places, colours).reshape(4, 3, 2, 2, 3)


def whitening_kernel() -> npt.NDArray[np.float64]:
    """Kernel [2, 2, 3, 24]: ``patch_axes`` with unit variance, and their negatives."""
    deviations = np.hypot(np.array(PATCH_DEVIATIONS), LEAST_DEVIATION)  # [4, 3]
    filters = patch_axes() / deviations[:, :, np.newaxis, np.newaxis, np.newaxis]
    filters = filters.reshape(-1, 2, 2, 3).transpose(1, 2, 3, 0)  # [2, 2, 3, 12]
    return np.concatenate([filters, -filters], axis=-1)
