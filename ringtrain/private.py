"""Private names of Keras and TensorFlow that ringtrain uses, each with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras


def all_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Return the model and all layers inside it, at any depth.

    Uses ``Layer._flatten_layers``: the public ``layers`` lists the first level only, and no layer inside a layer.
    """
    return list(model._flatten_layers())
