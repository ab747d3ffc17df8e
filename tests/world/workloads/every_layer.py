"""Models that hold every layer of Keras that trains, each in a branch of its own."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from ringtrain import Sources, Workload, from_arrays

NUM_FEATURES = 192
NUM_SAMPLES = 31
VECTOR, SEQUENCE, IMAGE, VOLUME = (192,), (32, 6), (8, 8, 3), (4, 4, 4, 3)
FILMS = {1: (4, 8, 6), 2: (4, 4, 4, 3), 3: (3, 4, 4, 2, 2)}  # [time, ..., channels]
Branch = tuple[tuple[int, ...], Callable[[], Any]]
RNN_OPTIONS = {"dropout": 0.3, "recurrent_dropout": 0.2}
IMAGE_OPTIONS: dict[str, dict[str, Any]] = {
    "RandomBrightness": {"factor": 0.2},
    "RandomContrast": {"factor": 0.2},
    "RandomColorDegeneration": {"factor": 0.5},
    "RandomColorJitter": {"brightness_factor": 0.2, "value_range": (0, 1)},
    "RandomHue": {"factor": 0.2, "value_range": (0, 1)},
    "RandomPosterization": {"factor": 4, "value_range": (0, 1)},
    "RandomRotation": {"factor": 0.2},
    "RandomSaturation": {"factor": 0.5},
    "RandomSharpness": {"factor": 0.5, "value_range": (0, 1)},
    "RandomShear": {"x_factor": 0.2, "y_factor": 0.2},
    "RandomTranslation": {"height_factor": 0.2, "width_factor": 0.2},
    "RandomZoom": {"height_factor": 0.2},
    "Solarization": {"value_range": (0, 1)},
}


def draw_in_training() -> dict[str, Branch]:
    """Layers that draw random numbers."""
    found: dict[str, Branch] = {
        "MultiHeadAttention": (SEQUENCE, lambda: attend_to_itself(layers.MultiHeadAttention(2, 3, dropout=0.3))),
        "Attention": (SEQUENCE, lambda: attend_in_list(layers.Attention(dropout=0.3, use_scale=True))),
        "AdditiveAttention": (SEQUENCE, lambda: attend_in_list(layers.AdditiveAttention(dropout=0.3))),
        "Bidirectional": (SEQUENCE, lambda: layers.Bidirectional(layers.LSTM(2, **RNN_OPTIONS))),
        "StackedRNNCells": (
            SEQUENCE,
            lambda: layers.RNN(layers.StackedRNNCells([layers.GRUCell(2, **RNN_OPTIONS), layers.LSTMCell(2)])),
        ),
        "TimeDistributed": (SEQUENCE, lambda: layers.TimeDistributed(layers.Dropout(0.3))),
    }
    for name in ("LSTM", "GRU", "SimpleRNN"):
        found[name] = SEQUENCE, lambda name=name: getattr(layers, name)(2, **RNN_OPTIONS)  # type: ignore[misc]
    for rank, shape in FILMS.items():
        name = f"ConvLSTM{rank}D"
        found[name] = shape, lambda name=name: getattr(layers, name)(2, 2, **RNN_OPTIONS)  # type: ignore[misc]
    for name in ("Dropout", "AlphaDropout", "GaussianDropout", "GaussianNoise"):
        found[name] = VECTOR, lambda name=name: getattr(layers, name)(0.3)  # type: ignore[misc]
    for rank, shape in enumerate((SEQUENCE, IMAGE, VOLUME), start=1):
        name = f"SpatialDropout{rank}D"
        found[name] = shape, lambda name=name: getattr(layers, name)(0.3)  # type: ignore[misc]
    if hasattr(layers, "GroupQueryAttention"):
        found["GroupQueryAttention"] = (
            SEQUENCE,
            lambda: attend_to_itself(layers.GroupQueryAttention(3, 4, 2, dropout=0.3)),
        )
    return found


def change_images() -> dict[str, Branch]:
    """Layers that change images at random."""
    names = [name for name in dir(layers) if name.startswith("Random") and name not in NOT_TRIED]
    names += [
        name for name in ("AugMix", "CutMix", "MixUp", "Mosaic", "RandAugment", "Solarization") if hasattr(layers, name)
    ]
    found: dict[str, Branch] = {
        name: (IMAGE, lambda name=name: getattr(layers, name)(**IMAGE_OPTIONS.get(name, {})))  # type: ignore[misc]
        for name in names
    }
    # Outside of training it gives another shape than it says.
    found["RandomCrop"] = IMAGE, lambda: lambda x: layers.GlobalAveragePooling2D()(layers.RandomCrop(6, 6)(x))
    if hasattr(layers, "Equalization"):
        found["Equalization"] = IMAGE, lambda: Within(layers.Equalization(value_range=(0, 1)))
    return found


def compute_alike() -> dict[str, Branch]:
    """Layers that draw nothing."""
    found: dict[str, Branch] = {
        "Dense": (VECTOR, lambda: layers.Dense(2, kernel_regularizer="l1", activity_regularizer="l2")),
        "EinsumDense": (SEQUENCE, lambda: layers.EinsumDense("abc,cd->abd", (32, 2), bias_axes="d")),
        "ActivityRegularization": (VECTOR, lambda: layers.ActivityRegularization(0.01, 0.01)),
        "Activation": (VECTOR, lambda: layers.Activation("gelu")),
        "Reshape": (VECTOR, lambda: layers.Reshape((6, 32))),
        "Permute": (SEQUENCE, lambda: layers.Permute((2, 1))),
        "RepeatVector": (VECTOR, lambda: layers.RepeatVector(2)),
        "Lambda": (VECTOR, lambda: layers.Lambda(lambda x: 2 * x)),
        "Rescaling": (VECTOR, lambda: layers.Rescaling(0.5)),
        "Masking": (SEQUENCE, lambda: layers.Masking()),
        "Normalization": (VECTOR, lambda: layers.Normalization(mean=0.1, variance=2.0)),
        "SpectralNormalization": (VECTOR, lambda: layers.SpectralNormalization(layers.Dense(2))),
        "GroupNormalization": (IMAGE, lambda: layers.GroupNormalization(3)),
        "Resizing": (IMAGE, lambda: layers.Resizing(4, 4)),
        "CenterCrop": (IMAGE, lambda: layers.CenterCrop(4, 4)),
        "RNN": (SEQUENCE, lambda: layers.RNN(layers.SimpleRNNCell(2))),
    }
    if hasattr(layers, "TernaryDense"):
        found["TernaryDense"] = VECTOR, lambda: layers.TernaryDense(2)
    for name in ("AutoContrast", "ContrastLimitedAdaptiveHistogramEqualization"):
        if hasattr(layers, name):
            found[name] = IMAGE, lambda name=name: getattr(layers, name)(value_range=(0, 1))  # type: ignore[misc]
    vectors = ("BatchNormalization", "LayerNormalization", "RMSNormalization", "UnitNormalization", "Flatten")
    for name in (*vectors, "ReLU", "LeakyReLU", "PReLU", "ELU", "Softmax", "Identity"):
        if hasattr(layers, name):
            found[name] = VECTOR, lambda name=name: getattr(layers, name)()  # type: ignore[misc]
    options: dict[str, Callable[[int], tuple[Any, ...]]] = {
        "Conv{}D": lambda rank: (2, 2),
        "Conv{}DTranspose": lambda rank: (2, 2),
        "SeparableConv{}D": lambda rank: (2, 2),
        "DepthwiseConv{}D": lambda rank: (2,),
        "AveragePooling{}D": lambda rank: (2,),
        "MaxPooling{}D": lambda rank: (2,),
        "AdaptiveAveragePooling{}D": lambda rank: (2,),
        "AdaptiveMaxPooling{}D": lambda rank: (2,),
        "GlobalAveragePooling{}D": lambda rank: (),
        "GlobalMaxPooling{}D": lambda rank: (),
        "ZeroPadding{}D": lambda rank: (1,),
        "Cropping{}D": lambda rank: (1,),
        "UpSampling{}D": lambda rank: (2,),
    }
    for pattern, arguments in options.items():
        for rank, shape in enumerate((SEQUENCE, IMAGE, VOLUME), start=1):
            name = pattern.format(rank)
            if hasattr(layers, name) and name not in NOT_TRIED:
                found[name] = shape, functools.partial(getattr(layers, name), *arguments(rank))
    for name in ("Add", "Average", "Concatenate", "Dot", "Maximum", "Minimum", "Multiply", "Subtract"):
        found[name] = VECTOR, lambda name=name: merge_with_its_dense(name)  # type: ignore[misc]
    return found


GROUPS: dict[str, Callable[[], dict[str, Branch]]] = {
    "draw": draw_in_training,
    "images": change_images,
    "alike": compute_alike,
}
# Bases, and cells whose layers are above; layers of words and whole numbers, which come before training (embeddings are
# tried in test_step.py); and those that run other programs' models.
NOT_TRIED = {
    *("Layer", "Wrapper", "InputLayer", "InputSpec", "Pipeline", "AbstractRNNCell"),
    *("GRUCell", "LSTMCell", "SimpleRNNCell", "Embedding", "ReversibleEmbedding", "MaxNumBoundingBoxes"),
    *("CategoryEncoding", "Discretization", "HashedCrossing", "Hashing", "IntegerLookup", "StringLookup"),
    *("TextVectorization", "MelSpectrogram", "STFTSpectrogram"),
    *("FlaxLayer", "JaxLayer", "TFSMLayer", "TorchModuleWrapper"),
}


class Within(layers.Layer):
    """Another layer, which Keras takes into a functional model in no other way."""

    def __init__(self, layer: keras.layers.Layer) -> None:
        super().__init__()
        self.layer = layer

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.layer(x, training=training)


def attend_to_itself(layer: Any) -> Callable[[Any], Any]:
    return lambda x: layer(x, x)


def attend_in_list(layer: Any) -> Callable[[Any], Any]:
    return lambda x: layer([x, x])


def merge_with_its_dense(name: str) -> Callable[[Any], Any]:
    options = {"axes": 1} if name == "Dot" else {}
    return lambda x: getattr(layers, name)(**options)([x, layers.Dense(NUM_FEATURES)(x)])


class EveryLayer(Workload):
    """The layers of a group, side by side."""

    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 4, "steps": 2, "optimizer": {"name": "adam"}}
    options: ClassVar[Mapping[str, Any]] = {"group": "draw", "only": ""}

    def create_model(self) -> keras.Model:
        inputs = keras.Input((NUM_FEATURES,))
        outputs = []
        for name, (shape, create) in GROUPS[self.options["group"]]().items():
            if not self.options["only"] or name in self.options["only"].split(","):
                x = layers.Reshape(shape)(layers.Dense(NUM_FEATURES)(inputs))
                outputs.append(layers.Dense(1)(layers.Flatten()(create()(x))))
        return keras.Model(inputs, layers.Concatenate()(outputs) if len(outputs) > 1 else outputs[0])

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        del data_dir, synthetic
        generator = np.random.default_rng(7)
        x = generator.uniform(size=(NUM_SAMPLES, NUM_FEATURES)).astype(np.float32)
        source = from_arrays(x, x[:, 0])
        return Sources(source, source)

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean((y[:, tf.newaxis] - outputs) ** 2, axis=1)
