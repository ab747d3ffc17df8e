"""Data-parallel training of TensorFlow/Keras models: one process per GPU, exactly what one process would train."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "make_parallel":  # by its name alone: whoever imports ringtrain does not start TensorFlow
        return importlib.import_module("ringtrain.parallel").make_parallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
