"""Data-parallel training of TensorFlow/Keras models: one process per GPU, exactly what one process would train."""

import importlib
from typing import Any

__version__ = "0.1.0"

ROOMS = {"make_parallel": "ringtrain.parallel", "train": "ringtrain.script"}


def __getattr__(name: str) -> Any:
    # By their names alone: whoever imports ringtrain does not start TensorFlow.
    if name in ROOMS:
        return getattr(importlib.import_module(ROOMS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
