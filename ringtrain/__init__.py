"""Data-parallel training of TensorFlow/Keras models: one process per GPU, exactly what one process would train.

``__all__`` is the public interface, imported on first use, so that importing ringtrain does not load TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringtrain.collectives.differentiable import all_gather
    from ringtrain.collectives.normalization import SyncBatchNormalization
    from ringtrain.config import Config, OptimizerConfig
    from ringtrain.data import augment
    from ringtrain.data.formats.image_folder import load_image_folder
    from ringtrain.data.formats.tfrecord import load_tfrecords
    from ringtrain.data.indexed import from_grain, from_pydataset
    from ringtrain.data.sources import (
        Feed,
        Pass,
        Source,
        from_arrays,
        from_callable,
        from_generator,
    )
    from ringtrain.data.tf_data import from_dataset
    from ringtrain.errors import (
        DataError,
        DivergedError,
        HangError,
        PreemptedError,
        ReplicasDifferError,
        RingtrainError,
        UsageError,
    )
    from ringtrain.parallel import make_parallel
    from ringtrain.script import train
    from ringtrain.workloads.base import Histogram, Images, Sources, Workload

__version__ = "0.2.0"

__all__ = [
    "Config",
    "DataError",
    "DivergedError",
    "Feed",
    "HangError",
    "Histogram",
    "Images",
    "OptimizerConfig",
    "Pass",
    "PreemptedError",
    "ReplicasDifferError",
    "RingtrainError",
    "Source",
    "Sources",
    "SyncBatchNormalization",
    "UsageError",
    "Workload",
    "__version__",
    "all_gather",
    "augment",
    "from_arrays",
    "from_callable",
    "from_dataset",
    "from_generator",
    "from_grain",
    "from_pydataset",
    "load_image_folder",
    "load_tfrecords",
    "make_parallel",
    "train",
]

# Modules without TensorFlow first.
_HOMES = (
    "errors",
    "config",
    "data.sources",
    "data.tf_data",
    "data.indexed",
    "workloads.base",
    "script",
    "data.formats.image_folder",
    "data.formats.tfrecord",
    "data.augment",
    "parallel",
    "collectives.normalization",
    "collectives.differentiable",
)

if not TYPE_CHECKING:  # mypy would accept any name

    def __getattr__(name: str) -> Any:
        for home in _HOMES if name in __all__ else ():
            module = importlib.import_module(f"ringtrain.{home}")
            if hasattr(module, name):
                return getattr(module, name)
            if home == f"data.{name}":
                return module
        removed_names = importlib.import_module("ringtrain.messages.removed").NAMES
        message = f"module {__name__!r} has no attribute {name!r}"
        if name in removed_names:
            message = f"ringtrain.{name} was removed. {removed_names[name]}"
        raise AttributeError(message)


def __dir__() -> list[str]:
    return __all__
