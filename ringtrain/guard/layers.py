"""The settings of a model's layers, which no variable shows: an activation, a penalty, a rate of dropout, a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

# These may differ: all ranks get the first weights of rank 0, and Keras draws a seed for a layer that has none.
OF_A_RANK = ("initializer", "seed", "build_config")


def describe_layers(model: keras.Model, is_own: Callable[[keras.Layer], bool] = lambda layer: False) -> list[str]:
    """Settings that must be the same on all ranks, in words, of all layers but those that are a rank's ``own``."""
    import keras

    containers = (keras.Sequential, keras.Model, keras.layers.InputLayer)  # what they hold comes by itself
    layers = [layer for layer in model._flatten_layers() if not isinstance(layer, containers)]
    return [
        f"{type(layer).__name__} (layer {number}): {setting}"
        for number, layer in enumerate(layers, 1)
        if not is_own(layer)
        for setting in _flatten(_config_of(layer))
    ]


def _config_of(layer: keras.Layer) -> Mapping[str, Any]:
    try:
        config = layer.get_config()
    except Exception:  # of the user's own code; Keras refuses for a layer whose arguments it does not know
        return {}
    return config if isinstance(config, Mapping) else {}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        is_of_a_layer = not prefix or "trainable" in config  # Keras numbers its name in the order of creation
        if str(name).endswith(OF_A_RANK) or (name == "name" and is_of_a_layer):
            continue
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={plain(value)}"


def plain(value: Any) -> str:
    """A value in words that are alike on all ranks: of an object without such words, its type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return str([plain(item) for item in value])
    return type(value).__name__
