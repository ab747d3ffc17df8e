"""Parts of a model that compute in a narrower type than the run.

``widened`` overrides the types of loss objects, layers and policies, and casts. ``find_narrow`` finds the rest, and the
comparison permits their rounding.
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import keras
import tensorflow as tf

from ringtrain.messages.defects import find_own_frame
from ringtrain.runtime.private import all_layers
from ringtrain.training.job import Job
from ringtrain.workloads.values import call_model, per_sample

# At most float32 in TensorFlow.
WITHOUT_FLOAT64 = {"AdaptiveAveragePooling3D", "AdaptiveMaxPooling3D", "AveragePooling3D", "MaxPooling3D"}
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
CASTS = ("keras.src.backend.tensorflow.core", "keras.src.ops.core")  # modules of keras.ops.cast
ALLOW_TF32 = tf.config.experimental.enable_tensor_float_32_execution
_KEPT = keras.DTypePolicy("float32")


class Narrow(NamedTuple):
    where: str
    dtype: str


@contextlib.contextmanager
def widened(dtype: str, *, widens_casts: bool = True) -> Iterator[list[str]]:
    """Make policies and loss objects give at least ``dtype`` in this scope.

    ``widens_casts``: also casts in models and losses. Yields the original types. TF32 (10 bits) is off.
    """
    policy, loss, cast = keras.DTypePolicy, keras.losses.Loss, tf.cast
    changed: list[str] = []

    def cast_widely(x: Any, dtype_of_cast: Any = None, name: str | None = None, **given: Any) -> Any:
        target = given.pop("dtype", dtype_of_cast)
        is_wide = hasattr(x, "dtype") and is_narrower(target, x.dtype) and not is_narrower(x.dtype, dtype)
        if not (is_wide and _is_cast_of_a_model(sys._getframe(1))):
            return cast(x, target, name)
        changed.append(tf.as_dtype(target).name)
        return cast(x, dtype, name)

    with contextlib.ExitStack() as stack:
        for owner, name in ((policy, "compute_dtype"), (policy, "variable_dtype"), (loss, "dtype")):
            getter = property(_widen(vars(owner)[name].fget, dtype))
            stack.enter_context(mock.patch.object(owner, name, getter))
        stack.callback(ALLOW_TF32, tf.config.experimental.tensor_float_32_execution_enabled())
        ALLOW_TF32(False)
        if widens_casts:
            stack.enter_context(mock.patch.object(tf, "cast", cast_widely))
        yield changed


def _is_cast_of_a_model(frame: Any) -> bool:
    """Return False for casts by ringtrain, TensorFlow, or inside other Keras operations."""
    module = frame.f_globals.get("__name__", "")
    while module in CASTS and frame.f_code.co_name == "cast":
        frame = frame.f_back
        module = frame.f_globals.get("__name__", "")
    is_symbolic = module in CASTS and frame.f_code.co_name == "call"  # keras.ops.cast in a functional model
    return is_symbolic or not module.startswith(("ringtrain.", "keras.", "tensorflow."))


def _widen(get: Callable[[Any], Any], dtype: str) -> Callable[[Any], Any]:
    def get_widened(owner: Any) -> Any:
        given = get(owner)
        return dtype if owner is not _KEPT and given is not None and is_narrower(given, dtype) else given

    return get_widened


def keep_narrow_layers(model: keras.Model) -> None:
    """Use float32 for layers that lack float64 in TensorFlow."""
    for layer in all_layers(model):
        if type(layer).__name__ in WITHOUT_FLOAT64:
            layer.dtype_policy = _KEPT


def is_narrower(dtype: Any, other: Any) -> bool:
    dtype, other = tf.as_dtype(dtype), tf.as_dtype(other)
    return dtype.is_floating and other.is_floating and dtype.size < other.size


def find_narrow(job: Job) -> list[Narrow]:
    """Trace again; find where model and loss narrow floats that depend on a weight."""
    workload, model, spec = job.workload, job.step.model, job.batches.element_spec

    def compute(x: Any, y: Any) -> Any:
        return per_sample(workload, y, call_model(workload, model, x, training=True))[0]

    graph = tf.function(compute, autograph=False).get_concrete_function(spec.x, spec.y).graph
    layers = {layer.name for layer in all_layers(model)}
    precision = job.config.precision if job.config.precision == "float64" else "float32"
    depending: set[str] = set()
    needed = _find_needed(graph.outputs)
    found = [
        Narrow(_describe_place(operation.name, layers, operation.traceback or ()), dtype.name)  # None: imported
        for operation in graph.get_operations()
        if operation.name in needed and (dtype := _find_narrowed(operation, depending, precision))
    ]
    for function in graph.as_graph_def().library.function:  # called functions, such as a user-defined tf.function
        for node in function.node_def:
            if node.op == "Cast" and is_narrower(node.attr["DstT"].type, node.attr["SrcT"].type):
                found.append(Narrow(_describe_place(node.name, layers), tf.as_dtype(node.attr["DstT"].type).name))
    narrow = [each for each in found if is_narrower(each.dtype, precision)]
    return list({each.where: each for each in narrow}.values())


def _find_needed(outputs: Sequence[tf.Tensor]) -> set[str]:
    """Find operations that outputs depend on, without metrics."""
    needed: set[str] = set()
    waiting = [tensor.op for tensor in outputs]
    while waiting:
        operation = waiting.pop()
        if operation.name not in needed:
            needed.add(operation.name)
            waiting += [tensor.op for tensor in operation.inputs]
    return needed


def _find_narrowed(operation: tf.Operation, depending: set[str], precision: str) -> tf.DType | None:
    """Return a narrower output type of an operation that depends on a weight; update ``depending``."""
    inputs = [tensor for tensor in operation.inputs if tensor.op.name in depending]
    if not inputs and operation.type not in READS:
        return None
    depending.add(operation.name)
    wide = [tensor for tensor in inputs if tensor.dtype.is_floating and not is_narrower(tensor.dtype, precision)]
    narrow = [tensor.dtype for tensor in operation.outputs if is_narrower(tensor.dtype, precision)]
    return narrow[0] if narrow and wide else None


def _describe_place(name: str, layers: set[str], frames: Any = ()) -> str:
    """Return FILE:LINE of user code, else the layer, else the operation."""
    summaries = [traceback.FrameSummary(frame.filename, frame.lineno, frame.name) for frame in frames]
    scopes = [scope for part in name.split("/") for scope in (re.sub(r"_\d+$", "", part), part)]  # TensorFlow adds _1
    inner = [scope for scope in scopes if scope in layers]
    return find_own_frame(summaries) or (f"layer {inner[-1]}" if inner else name)
