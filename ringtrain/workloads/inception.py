"""inception: Inception v3 with its auxiliary classifier (Szegedy et al. 2015, arXiv:1512.00567), on an image folder.

From the paper: optimizer and schedule (section 8), label smoothing (7), auxiliary classifier (4). From the authors'
code (tensorflow/models, research/slim: nets/inception_v3.py, nets/inception_utils.py, train_image_classifier.py):
weight of the auxiliary loss, weight decay, dropout, details of the auxiliary classifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringtrain.data.sources import from_arrays
from ringtrain.errors import DataError, UsageError
from ringtrain.workloads.base import Histogram, Images, Sources, Workload
from ringtrain.workloads.cifar10 import make_samples

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

MIN_IMAGE_SIZE = 75  # leaves one pixel after the last strided convolution
LABEL_SMOOTHING = 0.1
AUXILIARY_WEIGHT = 0.4
WEIGHT_DECAY = 0.00004  # of tf.nn.l2_loss, half the sum of squares
DROPOUT = 0.2
MAX_SHIFT = 1 / 8  # of an image's size
TOP = 5
NUM_SYNTHETIC = (512, 64)  # training, evaluation


class Inception(Workload):
    """Inception v3 on uint8 images [n, h, w, 3] of at least 75 pixels per side.

    Outputs: logits [n, classes] as ``main``, and as ``auxiliary`` for the loss only.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "batch_size": 32,
        "epochs": 100,
        "optimizer": {
            "name": "rmsprop",
            "lr": 0.045,
            "schedule": "exponential",
            "decay_rate": 0.94,
            "decay_epochs": 2,
            "rho": 0.9,
            "epsilon": 1.0,
            "clip_global_norm": 2.0,
        },
        "best_metric": "accuracy",
        "best_direction": "max",
    }

    options: ClassVar[Mapping[str, Any]] = {
        "image_size": None,  # target size in pixels; None: images have one size
        "synthetic_classes": 10,
    }

    def __init__(self) -> None:
        self._image_shape: tuple[int, int, int] = (MIN_IMAGE_SIZE, MIN_IMAGE_SIZE, 3)
        self._num_classes: int = self.options["synthetic_classes"]

    def create_model(self) -> keras.Model:
        """Needs the sources' image shape and classes: create those first."""
        return build_inception(self._image_shape, self._num_classes)

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        from ringtrain.data.formats.image_folder import load_image_folder
        from ringtrain.data.formats.tfrecord import find_files, load_tfrecords

        image_size = self.options["image_size"]
        if image_size is not None and (type(image_size) is not int or image_size < MIN_IMAGE_SIZE):
            raise UsageError(
                f"options.image_size is {image_size!r}; Inception v3 needs a whole number of pixels, at least "
                f"{MIN_IMAGE_SIZE}. The paper's is 299."
            )
        if synthetic:
            size, self._num_classes = image_size or MIN_IMAGE_SIZE, self.options["synthetic_classes"]
            if self._num_classes < 1:
                raise UsageError(f"options.synthetic_classes is {self._num_classes}; it must be at least 1.")
            self._image_shape = (size, size, 3)
            return Sources(*(from_arrays(*part) for part in make_samples(NUM_SYNTHETIC, size, self._num_classes)))
        if data_dir is None:
            raise UsageError(
                "inception needs images: name a folder that holds train/<class>/*.jpg, or train-*.tfrecord, with "
                "--data_dir, or take synthetic data with --synthetic true."
            )
        load = load_tfrecords if find_files(data_dir, "train") else load_image_folder
        train, evaluation = load(data_dir, image_size=image_size, channels=3)
        self._image_shape, self._num_classes = train.image_shape, train.num_classes
        if min(self._image_shape[:2]) < MIN_IMAGE_SIZE:
            height, width, _ = self._image_shape
            raise DataError(
                f"the images in {data_dir} have {height}x{width} pixels, and Inception v3 needs {MIN_IMAGE_SIZE} each "
                f"way. Have them enlarged, as with --options.image_size {MIN_IMAGE_SIZE}.",
                reach="node",
            )
        return Sources(train, evaluation)

    def loss(self, y: tf.Tensor, outputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
        return smoothed_cross_entropy(y, outputs["main"]) + AUXILIARY_WEIGHT * smoothed_cross_entropy(
            y, outputs["auxiliary"]
        )

    def metrics(self, y: tf.Tensor, outputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        import keras
        import tensorflow as tf

        logits = tf.cast(outputs["main"], tf.float32)  # tf.math.in_top_k takes no other type
        return {
            "accuracy": keras.metrics.sparse_categorical_accuracy(y, logits),
            f"top{TOP}_accuracy": keras.metrics.sparse_top_k_categorical_accuracy(y, logits, k=TOP),
        }

    def augment(self, x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        from ringtrain.data.augment import random_flip_left_right, random_shift

        x = random_flip_left_right(x, keys, draw=0)
        return random_shift(x, keys, int(min(x.shape[1:3]) * MAX_SHIFT), draw=1), y

    def summaries(self, model: keras.Model, x: tf.Tensor, y: tf.Tensor) -> dict[str, Images | Histogram]:
        return {"images": Images(np.asarray(x, np.float32) / 255)}


def build_inception(image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """uint8 images [n, *image_shape] -> {"main": logits, "auxiliary": logits}, [n, num_classes] each."""
    import keras
    from keras import layers

    images = keras.Input(image_shape, dtype="uint8", name="images")
    scaled = layers.Rescaling(1 / 127.5, offset=-1, name="rescaling")(images)  # to [-1, 1]
    body = keras.applications.InceptionV3(include_top=False, weights=None, input_tensor=scaled)
    features = layers.GlobalAveragePooling2D(name="pool")(body.output)  # [n, 2048]
    features = layers.Dropout(DROPOUT, name="dropout")(features)
    model = keras.Model(
        images,
        {
            "main": layers.Dense(num_classes, name="main")(features),
            "auxiliary": add_auxiliary_classifier(body.get_layer("mixed7").output, num_classes),
        },
        name="inception",
    )
    # ``WEIGHT_DECAY * tf.nn.l2_loss(kernel)``: Keras' L2 lacks the factor 1/2, and keras.applications takes none.
    for layer in model.layers:
        if hasattr(layer, "kernel"):
            layer.kernel_regularizer = layer.kernel.regularizer = keras.regularizers.L2(WEIGHT_DECAY / 2)
    return model


def add_auxiliary_classifier(features: keras.KerasTensor, num_classes: int) -> keras.KerasTensor:
    """Logits from the last layer of the 17x17 grid (for 299x299 images), [n, h, w, 768].

    Smaller images cut the kernels; larger ones average the outputs.
    """
    from keras import layers
    from keras.initializers import TruncatedNormal

    def convolve(inputs: keras.KerasTensor, filters: int, size: tuple[int, ...], name: str, **options: Any) -> Any:
        outputs = layers.Conv2D(filters, size, use_bias=False, name=f"auxiliary_{name}", **options)(inputs)
        outputs = layers.BatchNormalization(scale=False, name=f"auxiliary_{name}_bn")(outputs)
        return layers.Activation("relu", name=f"auxiliary_{name}_relu")(outputs)

    pool_size = cut_to(features, 5)
    outputs = layers.AveragePooling2D(pool_size, strides=3, name="auxiliary_pool")(features)  # [n, 5, 5, 768] for 299
    outputs = convolve(outputs, 128, (1, 1), "projection")
    outputs = convolve(outputs, 768, cut_to(outputs, 5), "convolution", kernel_initializer=TruncatedNormal(stddev=0.01))
    outputs = layers.GlobalAveragePooling2D(name="auxiliary_features")(outputs)  # [n, 768]
    return layers.Dense(num_classes, name="auxiliary", kernel_initializer=TruncatedNormal(stddev=0.001))(outputs)


def cut_to(features: keras.KerasTensor, size: int) -> tuple[int, ...]:
    """Limit a kernel size to the features [n, h, w, c]."""
    return tuple(min(size, extent) for extent in features.shape[1:3])


def smoothed_cross_entropy(y: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Return [n], with LABEL_SMOOTHING (section 7)."""
    import keras
    import tensorflow as tf

    targets = tf.one_hot(y, logits.shape[-1], dtype=logits.dtype)
    return keras.losses.categorical_crossentropy(targets, logits, from_logits=True, label_smoothing=LABEL_SMOOTHING)
