"""``make_parallel``: a function of batched tensors, computed in slices on all ranks, with the whole result on each.

Inputs pass through ``take``, captured tensors and variables through ``all_reduce_gradient``, outputs through ``gather``
or ``add`` (collectives/differentiable.py): if every rank computes the same loss from the result, its gradient equals
one process's.
"""

from __future__ import annotations

import contextvars
import functools
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ringtrain.collectives import Collective, connect
from ringtrain.collectives.consistency import requiring_same_inputs
from ringtrain.collectives.differentiable import Tensors, add, gather, is_differentiable, take_and_spread, unique_name
from ringtrain.errors import UsageError
from ringtrain.runtime.devices import uses_horovod
from ringtrain.runtime.private import are_recorded, call_with_captures, note_read
from ringtrain.runtime.world import World, read_world

RULES = ("concat", "mean", "sum")
# Types that Horovod supports.
TRAVELLING = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool")
# Errors of nested calls, which AutoGraph would convert.
_nested: contextvars.ContextVar[list[UsageError] | None] = contextvars.ContextVar("_nested", default=None)
_TRACES = "_ringtrain_parallel_traces"  # function attribute: traces by input specs


def make_parallel(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    combine: Any = "concat",
    collective: Collective | None = None,
    **inputs: Any,
) -> Any:
    """Run a function on each rank's slice of the inputs, and return the whole result on every rank.

    Use it as ``make_parallel(fn, x=images)``, ``make_parallel(fn)`` or ``@make_parallel(combine="mean")``. Every rank
    must make the same calls in the same order, with the same inputs and variables.

    Rank r gets the samples from count*r//size up to count*(r+1)//size, exclusive. A rank with an empty slice runs
    ``fn`` on one sample and drops the result: ``fn`` gets an empty batch only if the inputs are empty. ``fn`` is traced
    as by ``tf.function``, for any batch size. It must treat samples independently and assign no variables.

    Args:
        fn: takes and returns tensors [n, ...], or structures of them.
        combine: rule for all outputs, or a dict, tuple or list of rules that matches the outputs (a rule applies to all
            outputs below it):

            - ``"concat"``: concatenate along the first dimension, in the order of the ranks.
            - ``"mean"``: sum over ranks of output * n_r / n, for n_r of n samples: the exact mean over all samples, if
              an output is its slice's mean. Floating, with a shape that does not depend on n.
            - ``"sum"``: sum over ranks. Shapes as for ``"mean"``.
        collective: default: the launcher's ranks. ``ringtrain.keras.init()`` before gives each its own GPU or cores.
        inputs: named inputs, to call ``fn`` at once; for others, or names ``combine`` and ``collective``, call
            ``make_parallel(fn)(...)``. None, True, False and strings are passed unchanged.

    Returns:
        The result of ``fn`` if inputs are given, else the parallel function. It is differentiable with respect to
            inputs, variables and captured tensors, in and outside ``tf.function``: every rank gets the gradient of the
            whole, if all compute the same loss from the result. Sparse gradients become dense.

    Raises:
        UsageError: no inputs; an input that is no tensor, is a scalar, or differs in its first dimension; on every
            rank, shapes or types that differ between ranks (``InvalidArgumentError`` in a user-defined
            ``tf.function``); a ``combine`` that is unknown or does not match the outputs.
    """
    _check_words(combine)
    if fn is None and not inputs:
        return functools.partial(make_parallel, combine=combine, collective=collective)
    if not callable(fn):
        raise UsageError(
            f"make_parallel got fn={fn!r}, which cannot be called; the function comes first. Call make_parallel(fn, "
            "x=x)."
        )
    parallel = _parallel(fn, combine, collective)
    return parallel(**inputs) if inputs else parallel


def _parallel(fn: Callable[..., Any], combine: Any, collective: Collective | None) -> Callable[..., Any]:
    # Plain functions keep their traces.
    traces: dict[str, Any] = vars(fn).setdefault(_TRACES, {}) if isinstance(fn, types.FunctionType) else {}

    @functools.wraps(fn)
    def parallel(*args: Any, **kwargs: Any) -> Any:
        return _run(fn, (args, kwargs), combine, collective or _connect_from_environment(), traces)

    return tf.autograph.experimental.do_not_convert(parallel)  # fn itself is converted when traced


class _Share(NamedTuple):
    """This rank's slice; tensors [] if the count is unknown before the graph runs."""

    count: Any  # samples on all ranks
    size: Any  # samples on this rank
    # Slice that fn runs on: this rank's, or the first sample if it is empty.
    run_start: Any
    run_end: Any
    # True if this rank's output counts; without any samples, rank 0's does.
    is_used: Any


def _run(fn: Callable[..., Any], inputs: Any, combine: Any, collective: Collective, traces: dict[str, Any]) -> Any:
    if (nested := _nested.get()) is not None:
        error = UsageError(
            "make_parallel was called within a function that it runs, where each rank has its own slice already, which "
            "would be divided again. Call the inner function as it is, without make_parallel."
        )
        nested.append(error)
        raise error
    labelled = _read_inputs(*inputs)
    leaves = [leaf for _, leaf in labelled]
    tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
    name = unique_name("parallel")
    share = _share_of(collective.world, tensors)
    with requiring_same_inputs(labelled, collective, name) as checks:
        trace = _trace(fn, tf.nest.pack_sequence_as(inputs, leaves), traces)
        rules = _rules_of(combine, trace.structured_outputs)
        _check_outputs(rules, trace, tensors, collective.world.size)
        outputs = call_with_captures(trace, *_prepare(tensors, trace, share, collective, f"{name}/inputs"))
    with tf.control_dependencies(checks):
        parts = [tf.identity(output) for output in tf.nest.flatten(outputs)]
    return tf.nest.pack_sequence_as(outputs, _combine(parts, rules, share, collective, name))


def _read_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return flat inputs with labels: tensors [n, ...], other objects unchanged."""
    labelled = [(f"argument {i}", arg) for i, arg in enumerate(args)]
    labelled += [(repr(name), kwargs[name]) for name in sorted(kwargs)]  # order of tf.nest
    leaves = [
        (label, leaf if leaf is None or isinstance(leaf, (bool, str)) else _to_batch(label, leaf))
        for label, value in labelled
        for leaf in tf.nest.flatten(value)
    ]
    batches = [(label, leaf) for label, leaf in leaves if isinstance(leaf, tf.Tensor)]
    if not batches:
        raise UsageError(
            "a parallel function was called without inputs; its samples are divided among the ranks, so at least one "
            "batched tensor is needed. Give it the whole batch, such as parallel(x)."
        )
    lengths = [
        (label, tensor.shape[0]) for label, tensor in batches if tensor.shape.rank and tensor.shape[0] is not None
    ]
    if len({length for _, length in lengths}) > 1:
        raise UsageError(
            f"inputs of a parallel function have {', '.join(f'{length} ({label})' for label, length in lengths)} "
            "samples; the first dimension counts the samples and must be the same in all. Give all inputs of the "
            "batch, and what is no batch to fn by functools.partial."
        )
    return leaves


def _to_batch(label: str, value: Any) -> tf.Tensor:
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"input {label} of a parallel function is {value!r}; inputs must be tensors or arrays, whose first "
            "dimension counts the samples. Give anything else to fn by functools.partial."
        ) from error
    if tensor.shape.rank == 0:
        raise UsageError(
            f"input {label} of a parallel function is a scalar ({value!r}); the first dimension of an input counts the "
            "samples. Give what is the same for all samples to fn by functools.partial."
        )
    return tensor


def _share_of(world: World, tensors: Tensors) -> _Share:
    known = [tensor.shape[0] for tensor in tensors if tensor.shape.rank and tensor.shape[0] is not None]
    count = known[0] if known else tf.shape(tensors[0], tf.int64)[0]
    start, end = count * world.rank // world.size, count * (world.rank + 1) // world.size
    is_idle = (end == start) & (count > 0)
    run_start, run_end = start * (1 - _number(is_idle)), end * (1 - _number(is_idle)) + _number(is_idle)
    return _Share(count, end - start, run_start, run_end, (end > start) | ((count == 0) & world.is_rank0))


def _number(truth: Any) -> Any:
    return int(truth) if isinstance(truth, bool) else tf.cast(truth, tf.int64)


def _trace(fn: Callable[..., Any], inputs: Any, traces: dict[str, Any]) -> Any:
    """Return a ConcreteFunction, whose ``_call_flat`` takes captured tensors: only so can operations precede them."""
    like = tf.nest.map_structure(_to_spec, inputs)  # the trace must not keep tensors alive
    key = repr(like)
    if tf.executing_eagerly() and key in traces:
        return traces[key]

    nested: list[UsageError] = []

    def call(*slices: tf.Tensor) -> Any:
        remaining = iter(slices)
        args, kwargs = tf.nest.map_structure(lambda x: next(remaining) if isinstance(x, tf.TensorSpec) else x, like)
        before = _nested.set(nested)
        try:
            return fn(*args, **kwargs)
        finally:
            _nested.reset(before)

    specs = [leaf for leaf in tf.nest.flatten(like) if isinstance(leaf, tf.TensorSpec)]
    try:
        trace = tf.function(call).get_concrete_function(*specs)
    except Exception:
        if nested:
            raise nested[0] from None
        raise
    # Captured tensors may differ at the next call; variables do not.
    if tf.executing_eagerly() and all(tensor.dtype == tf.resource for tensor in trace.captured_inputs):
        traces[key] = trace
    return trace


def _to_spec(leaf: Any) -> Any:
    if not isinstance(leaf, tf.Tensor):
        return leaf
    return tf.TensorSpec([None, *leaf.shape[1:]] if leaf.shape.rank else None, leaf.dtype)


def _prepare(inputs: Tensors, trace: Any, share: _Share, collective: Collective, name: str) -> tuple[Tensors, Tensors]:
    """Return this rank's slices, and captured tensors; variables as handles, which no operation has read."""

    def cut(whole: tf.Tensor) -> tf.Tensor:
        return whole[share.run_start : share.run_end]

    for variable in trace.graph.variables:
        note_read(variable)  # tapes otherwise notice a variable only when it is read
    frozen = {id(variable.handle) for variable in trace.graph.variables if not variable.trainable}
    captures = list(trace.captured_inputs)
    taken = [i for i, tensor in enumerate(inputs) if _may_need_gradient(tensor, is_frozen=False)]
    spread = [i for i, tensor in enumerate(captures) if _may_need_gradient(tensor, is_frozen=id(tensor) in frozen)]
    slices = [tensor if i in taken else cut(tensor) for i, tensor in enumerate(inputs)]
    rows, shared = take_and_spread(
        [inputs[i] for i in taken], [captures[i] for i in spread], cut, share.size, collective, name
    )
    for tensors, positions, values in ((slices, taken, rows), (captures, spread, shared)):
        for i, value in zip(positions, values, strict=True):
            tensors[i] = value
    return slices, captures


def _may_need_gradient(tensor: tf.Tensor, *, is_frozen: bool) -> bool:
    """True if a tape watches it or, in a graph, an outer tape may."""
    if not is_differentiable(tensor):
        return False
    return are_recorded(tensor) or not (tf.executing_eagerly() or is_frozen)


def _check_words(combine: Any) -> None:
    for word in tf.nest.flatten(combine):
        if word not in RULES:
            raise UsageError(
                f"combine has {word!r}; each word must be 'concat', 'mean' or 'sum'. Give one for all outputs, or a "
                "structure of them that matches the outputs."
            )


def _rules_of(combine: Any, outputs: Any) -> list[str]:
    if isinstance(combine, str):
        return [combine] * len(tf.nest.flatten(outputs))
    if isinstance(combine, Mapping) and isinstance(outputs, Mapping) and set(combine) == set(outputs):
        return [rule for key in sorted(outputs) for rule in _rules_of(combine[key], outputs[key])]
    is_sequence = isinstance(combine, (list, tuple)) and isinstance(outputs, (list, tuple))
    if is_sequence and len(combine) == len(outputs):
        return [rule for pair in zip(combine, outputs, strict=True) for rule in _rules_of(*pair)]
    raise UsageError(
        f"combine={combine!r} does not match the outputs, {tf.nest.map_structure(lambda t: t.shape, outputs)}; it must "
        "be one word, or have the outputs' structure. Give a word for each output."
    )


def _check_outputs(rules: Sequence[str], trace: Any, inputs: Tensors, size: int) -> None:
    are_shapes_known = all(tensor.shape[1:].is_fully_defined() for tensor in inputs)
    for number, (rule, output) in enumerate(zip(rules, tf.nest.flatten(trace.structured_outputs), strict=True)):
        problem = ""
        if not isinstance(output, tf.Tensor) and not isinstance(output, tf.TensorSpec):
            problem = f"is {output!r}, but outputs must be tensors. Return tensors"
        elif size > 1 and output.dtype.name not in TRAVELLING:
            problem = f"is {output.dtype.name}, which does not travel between ranks. Cast it within fn, or leave it out"
        elif rule == "concat" and output.shape.rank == 0:
            problem = "is a scalar, which cannot be joined along a first dimension. Use 'mean' or 'sum' for it"
        elif rule == "mean" and not (output.dtype.is_floating or output.dtype.is_complex):
            problem = f"is {output.dtype.name}, which has no means. Cast it to a floating type, or use 'sum'"
        elif rule != "concat" and are_shapes_known and output.shape.rank and output.shape[0] is None:
            problem = (
                f"has the shape {output.shape}, whose first dimension is not the same on every rank. Reduce it over "
                "its samples within fn, or use 'concat'"
            )
        if problem:
            raise UsageError(f"combine is {rule!r} for output {number} of a parallel function, which {problem}.")


def _combine(parts: Tensors, rules: Sequence[str], share: _Share, collective: Collective, name: str) -> Tensors:
    """Collectives have the same order on every rank."""
    whole = list(parts)
    summed = [i for i, rule in enumerate(rules) if rule != "concat"]
    for i, part in enumerate(parts):
        if rules[i] == "concat":
            rows = tf.where(share.is_used, tf.shape(part)[0], 0)
            whole[i] = gather(part[:rows], collective, f"{name}/output_{i}")
        else:
            # tf.where, not a factor of 0: unused values may be infinite.
            whole[i] = tf.where(share.is_used, part, tf.zeros_like(part))
            if rules[i] == "mean":
                whole[i] *= tf.cast(tf.cast(share.size, tf.float64) / tf.cast(share.count, tf.float64), part.dtype)
    for i, total in zip(summed, add([whole[i] for i in summed], collective, f"{name}/outputs"), strict=True):
        whole[i] = total
    return whole


@functools.cache
def _connect_from_environment() -> Collective:
    world = read_world(os.environ)
    if world.size > 1 and not uses_horovod("auto", world.launcher):
        # TensorFlow runs gradients for an outer tape in any order; MPI requires one order.
        raise UsageError("make_parallel joins the ranks by Horovod, which is not installed. Run: make setup HOROVOD=1")
    return connect("auto", world)
