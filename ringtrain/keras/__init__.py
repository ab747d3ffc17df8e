"""Horovod's Keras interface for Keras 3: ``import ringtrain.keras as hvd``.

It replaces ``horovod.tensorflow.keras``, whose ``DistributedOptimizer`` reduces nothing under Keras 3.
"""

import sys
from typing import Any

try:
    import horovod.tensorflow
except ModuleNotFoundError as error:
    if error.name == "horovod":
        error.msg = (
            "ringtrain.keras passes on what Horovod has, and Horovod is not installed. Run: make setup HOROVOD=1"
        )
    raise
from horovod.tensorflow import (
    Adasum,
    Average,
    Compression,
    ProcessSet,
    Sum,
    add_process_set,
    allgather_object,
    broadcast_object,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from horovod.tensorflow.keras import allgather, allreduce, broadcast, broadcast_global_variables, reducescatter

from ringtrain.collectives.normalization import SyncBatchNormalization
from ringtrain.keras import callbacks, elastic
from ringtrain.keras.auditing.session import audit
from ringtrain.keras.collective import broadcast_variables
from ringtrain.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from ringtrain.keras.start import init
from ringtrain.keras.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "audit",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

PAGE = "docs/coming-from-horovod.md"
NOT_HERE = {
    "DistributedAdasumOptimizer": "give DistributedOptimizer op=ringtrain.keras.Adasum",
    "BroadcastGlobalVariablesHook": "it is TensorFlow 1's; use callbacks.BroadcastGlobalVariablesCallback",
    "broadcast_parameters": "it is PyTorch's; use broadcast_variables",
    "broadcast_optimizer_state": "it is PyTorch's; use broadcast_variables(optimizer.variables, root_rank=0)",
}


def __getattr__(name: str) -> Any:
    why = NOT_HERE.get(name)
    if why is None and not name.startswith("_") and hasattr(horovod.tensorflow, name):
        why = f"take it from horovod.tensorflow, imported in addition to this module, after {__name__}.init()"
    if why is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Python replaces an AttributeError if the name is in an import statement.
    is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"
    raise (ImportError if is_import else AttributeError)(f"{__name__} has no {name!r}: {why}. See {PAGE}.")
