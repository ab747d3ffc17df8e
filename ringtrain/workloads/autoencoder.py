"""autoencoder: a convolutional autoencoder whose depth depends on the image size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringtrain.data.sources import ArraySource, Source
from ringtrain.errors import UsageError
from ringtrain.workloads.base import Histogram, Images, Sources, Workload
from ringtrain.workloads.cifar10 import read_sources
from ringtrain.workloads.digits import Digits

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

IMAGE_SHAPES = {"cifar10": (32, 32, 3), "digits": (8, 8, 1)}
"""Height, width and channels of the images of each value of the option ``data``."""
LEAST_SIDE = 2  # pixels of the innermost layer
MAX_LEVELS = 5  # 1,024 channels if the first layer has 64


class Autoencoder(Workload):
    """Convolutions that halve the image and double the channels per level, then transposed ones.

    Options: ``data``: cifar10 or digits; ``width``: channels of the first level; ``gradients``: for TensorBoard.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "epochs": 20,
        "batch_size": 64,
        "optimizer": {"name": "adam", "lr": 1e-3, "schedule": "cosine"},
    }
    options: ClassVar[Mapping[str, Any]] = {"data": "cifar10", "width": 64, "gradients": False}

    def create_model(self) -> keras.Model:
        return create_autoencoder(image_shape(self.options["data"]), self.options["width"])

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        image_shape(self.options["data"])  # fail early on a wrong name
        labelled = Digits().create_sources if self.options["data"] == "digits" else read_sources
        train, evaluation = labelled(data_dir, synthetic=synthetic)
        assert isinstance(train, ArraySource)
        assert isinstance(evaluation, ArraySource)
        return Sources(ImagesOf(train), ImagesOf(evaluation))

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Mean squared error of each image, [n]."""
        import keras

        return keras.ops.mean(keras.ops.square(outputs - keras.ops.cast(y, outputs.dtype)), axis=(1, 2, 3))

    def summaries(self, model: keras.Model, x: tf.Tensor, y: tf.Tensor) -> dict[str, Images | Histogram]:
        import keras
        import tensorflow as tf

        layers = [layer for layer in model.layers if layer.weights]
        inner = keras.Model(model.input, [model.output, *(layer.output for layer in layers)])
        reconstructions, *activations = inner(x, training=False)
        histograms = weights_by_tag(model)
        histograms |= {f"activations/{layer.name}": v for layer, v in zip(layers, activations, strict=True)}
        if self.options["gradients"]:  # of the mean loss, on this rank only
            weights = {tag: weight.value for tag, weight in weights_by_tag(model).items()}
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.loss(y, model(x, training=False)))
            histograms |= {f"gradients/{tag}": values for tag, values in tape.gradient(loss, weights).items()}
        images = [np.asarray(part, np.float32) for part in (x, reconstructions)]  # [n, h, w, c] each
        return {
            "images": Images(np.concatenate(images, axis=2)),
            **{tag: Histogram(np.asarray(values, np.float32)) for tag, values in histograms.items()},
        }


@dataclass(frozen=True)
class ImagesOf:
    """A source's images as inputs and targets. Bytes become floats in [0, 1]."""

    labelled: Source

    @property
    def num_samples(self) -> int:
        return self.labelled.num_samples

    def gather(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return images float32 [n, h, w, c], twice."""
        import tensorflow as tf

        images, _ = self.labelled.gather(indices)
        if images.dtype == tf.uint8:
            images = tf.cast(images, tf.float32) / 255
        return images, images


def image_shape(data: str) -> tuple[int, int, int]:
    """Return (height, width, channels)."""
    if data not in IMAGE_SHAPES:
        raise UsageError(f"options.data is {data!r}; it must be one of {', '.join(IMAGE_SHAPES)}.")
    return IMAGE_SHAPES[data]


def plan_sides(side: int, levels: int) -> list[int]:
    """In pixels, before and after each level: halves, rounded up."""
    return [-(-side // 2**level) for level in range(levels + 1)]


def choose_levels(height: int, width: int) -> int:
    """Leave at least ``LEAST_SIDE`` pixels."""
    return sum(side >= LEAST_SIDE for side in plan_sides(min(height, width), MAX_LEVELS)[1:])


def create_autoencoder(shape: tuple[int, int, int], width: int) -> keras.Model:
    """Images [n, *shape] in [0, 1] -> the same shape, in (0, 1). ``width`` channels, doubled per level."""
    import keras
    from keras import layers

    if width < 1:
        raise UsageError(f"options.width is {width}; it must be at least 1.")
    height, breadth, channels = shape
    levels = choose_levels(height, breadth)
    heights, breadths = plan_sides(height, levels), plan_sides(breadth, levels)
    convolution = {"kernel_size": 3, "strides": 2, "padding": "same"}
    hidden = {**convolution, "activation": "relu", "kernel_initializer": "he_normal"}
    x = images = keras.Input(shape)
    for level in range(levels):
        x = layers.Conv2D(width * 2**level, name=f"encoder{level + 1}", **hidden)(x)
    for level in reversed(range(1, levels)):
        x = layers.Conv2DTranspose(width * 2 ** (level - 1), name=f"decoder{level + 1}", **hidden)(x)
        x = crop(x, heights[level], breadths[level])
    if levels:
        x = layers.Conv2DTranspose(channels, activation="sigmoid", name="decoder1", **convolution)(x)
    else:  # too small to halve
        x = layers.Conv2D(channels, 3, padding="same", activation="sigmoid", name="decoder1")(x)
    return keras.Model(images, crop(x, height, breadth), name="autoencoder")


def crop(x: Any, height: int, breadth: int) -> Any:
    """Remove a surplus first row or column of a transposed convolution.

    The encoder's windows are centred at even pixels of odd sides; the transposed convolution's always at odd ones.
    """
    from keras import layers

    surplus = ((x.shape[1] - height, 0), (x.shape[2] - breadth, 0))
    return layers.Cropping2D(surplus)(x) if any(before for before, _ in surplus) else x


def weights_by_tag(model: keras.Model) -> dict[str, keras.Variable]:
    """Tags: ``weights/encoder1`` for a kernel, ``biases/encoder1`` for a bias."""
    kinds = {"kernel": "weights", "bias": "biases"}
    return {
        f"{kinds[variable.name]}/{layer.name}": variable
        for layer in model.layers
        for variable in layer.trainable_variables
    }
