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
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    size_op,
    start_timeline,
    stop_timeline,
)
from horovod.tensorflow.keras import broadcast_global_variables

from ringtrain.collectives.normalization import SyncBatchNormalization
from ringtrain.keras import callbacks, elastic
from ringtrain.keras.auditing.session import audit
from ringtrain.keras.collective import broadcast_variables
from ringtrain.keras.operations import (
    allgather,
    allgather_object,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    broadcast_object,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from ringtrain.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from ringtrain.keras.start import init
from ringtrain.keras.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "audit",
    "broadcast",
    "broadcast_",
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
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

PAGE = "docs/coming-from-horovod.md"
NOT_HERE = {
    "DistributedAdasumOptimizer": "give DistributedOptimizer op=ringtrain.keras.Adasum",
    "BroadcastGlobalVariablesHook": "it is TensorFlow 1's; use callbacks.BroadcastGlobalVariablesCallback",
    "broadcast_object_fn": "it needs a session of TensorFlow 1; use broadcast_object",
    "broadcast_parameters": "it is PyTorch's; use broadcast_variables",
    "broadcast_optimizer_state": "it is PyTorch's; use broadcast_variables(optimizer.variables, root_rank=0)",
}


def __getattr__(name: str) -> Any:
    why = NOT_HERE.get(name)
    if why is None and not name.startswith("_") and hasattr(horovod.tensorflow, name):
        why = f"it is internal to Horovod; import horovod.tensorflow to use it, after {__name__}.init()"
    if why is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Python replaces an AttributeError if the name is in an import statement.
    is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"
    raise (ImportError if is_import else AttributeError)(f"{__name__} has no {name!r}: {why}. See {PAGE}.")
