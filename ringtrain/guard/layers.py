"""Settings of layers that variables do not show, such as activations and dropout rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ringtrain.config import flatten_settings

if TYPE_CHECKING:
    import keras

# These may differ: rank 0's weights are broadcast, and Keras draws missing seeds.
OF_A_RANK = ("initializer", "seed", "build_config")


def describe_layers(model: keras.Model, is_own: Callable[[keras.Layer], bool] = lambda layer: False) -> list[str]:
    """Settings that must be equal on all ranks, without layers that a rank trains alone."""
    import keras

    containers = (keras.Sequential, keras.Model, keras.layers.InputLayer)  # their layers are listed separately
    layers = [layer for layer in model._flatten_layers() if not isinstance(layer, containers)]
    return [
        f"{type(layer).__name__} (layer {number}): {setting}"
        for number, layer in enumerate(layers, 1)
        if not is_own(layer)
        for setting in _flatten(_config_of(layer))
    ]


def draws(layer: keras.Layer) -> bool:
    """True if a layer draws random numbers; Keras' then have seed generators."""
    rates = [getattr(layer, name) for name in ("dropout", "recurrent_dropout") if hasattr(layer, name)]
    return bool(layer._seed_generators) and (not rates or any(rates))


def _config_of(layer: keras.Layer) -> Mapping[str, Any]:
    try:
        config = layer.get_config()
    except Exception:  # from user code; Keras raises for layers with unknown arguments
        return {}
    return config if isinstance(config, Mapping) else {}


def _flatten(config: Mapping[str, Any]) -> Iterator[str]:
    settings = {str(path): value for path, value in flatten_settings(config).items()}
    for path, value in settings.items():
        parent, _, name = path.rpartition(".")
        is_of_a_layer = not parent or f"{parent}.trainable" in settings  # a layer's name; Keras numbers it by creation
        if not (name == "name" and is_of_a_layer) and not any(part.endswith(OF_A_RANK) for part in path.split(".")):
            yield f"{path}={plain(value)}"


def plain(value: Any) -> str:
    """Text that is equal on all ranks: of other objects, the type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return str([plain(item) for item in value])
    return type(value).__name__
