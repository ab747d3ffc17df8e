"""``make_parallel``: any function of batched tensors, each rank computing its slice, the whole result on every rank.

How gradients are defined. Every rank holds the same whole inputs and the same variables, and computes the same loss
from the same whole result. Inputs pass through ``take``, what the function reads besides (variables, tensors of the
code around it) through ``spread``, outputs through ``gather`` or ``add`` (collectives/differentiable.py). Backwards,
a rank takes its own rows of the result's gradient, the function's own gradient follows, then each variable's is added
over the ranks, and those of the inputs are gathered. So ``tape.gradient`` gives on every rank what one process gets.
"""

from __future__ import annotations

import contextvars
import functools
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager.record import should_record_backprop
from tensorflow.python.ops.resource_variable_ops import variable_accessed

from ringtrain.collectives import Collective, connect
from ringtrain.collectives.alike import requiring_same_inputs
from ringtrain.collectives.differentiable import Tensors, add, gather, is_differentiable, take_and_spread, unique_name
from ringtrain.errors import UsageError
from ringtrain.runtime.devices import uses_horovod
from ringtrain.runtime.world import World, read_world

RULES = ("concat", "mean", "sum")
# The types that Horovod carries.
TRAVELLING = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool")
# While a parallel function is traced: the errors of calls within it, which AutoGraph would make others of.
_nested: contextvars.ContextVar[list[UsageError] | None] = contextvars.ContextVar("_nested", default=None)
_TRACES = "_ringtrain_parallel_traces"  # attribute of a function: its traces by what the inputs look like


def make_parallel(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    combine: Any = "concat",
    collective: Collective | None = None,
    **inputs: Any,
) -> Any:
    """Let each rank run a function on its slice of the inputs, and give every rank the whole result.

    Use it as ``make_parallel(fn, x=images, y=labels)``, as ``parallel = make_parallel(fn)`` for later calls, or as the
    decorator ``@make_parallel`` or ``@make_parallel(combine="mean")``. Every rank must make the same calls in the same
    order, with the same whole inputs and the same values of variables.

    Rank r gets the positions count*r//size up to, not including, count*(r+1)//size of each input. A rank whose slice is
    empty runs ``fn`` on one sample of the inputs and drops what comes of it, so that ``fn`` never sees an empty batch,
    unless the inputs are empty. ``fn`` is traced as by ``tf.function``: once for each structure of inputs, shapes (but
    for the first dimension) and types. To give the result of one process it must treat samples independently, and
    it must not assign variables: each rank would do so by its slice.

    Args:
        fn: takes tensors [n, ...], or structures of them; returns tensors, or structures of them.
        combine: what becomes of the ranks' outputs. One word for all outputs, or a dict, tuple or list of words that
            matches the outputs (a word stands for all outputs below it):

            - ``"concat"``: joined along the first dimension, in the order of the ranks.
            - ``"mean"``: the sum over ranks of output * n_r / n, for n_r of n samples. If an output is the mean over
              its slice's samples, that is the exact mean over all samples. Outputs are floating, and of the same shape
              for any number of samples.
            - ``"sum"``: added up. Shapes as for ``"mean"``.
        collective: the ranks; by default those of the launcher, which are joined on the first call. Call
            ``ringtrain.keras.init()`` before to give each rank its own GPU or cores.
        inputs: the inputs by name, to call ``fn`` at once. For one named ``combine`` or ``collective``, or without a
            name, call ``make_parallel(fn)(...)``. None, True, False and strings are passed on as they are.

    Returns:
        The result of ``fn``, where inputs are given; the parallel function otherwise. It is differentiable with respect
        to the inputs, to variables, and to other tensors that ``fn`` uses, in and outside ``tf.function``: every rank
        gets the gradient of the whole, where every rank computes the same loss from the result. Sparse gradients become
        dense.

    Raises:
        UsageError: no inputs; an input that is no tensor, is a scalar, or has another first dimension than the others;
            on every rank, inputs that are of other shapes or types on one (in a ``tf.function`` of yours, which makes
            an ``InvalidArgumentError`` of it); ``combine`` is no rule, or does not match the outputs.
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
    # If fn is a plain function the traces are kept with it: make_parallel(fn, x=x) in a loop traces once.
    traces: dict[str, Any] = vars(fn).setdefault(_TRACES, {}) if isinstance(fn, types.FunctionType) else {}

    @functools.wraps(fn)
    def parallel(*args: Any, **kwargs: Any) -> Any:
        return _run(fn, (args, kwargs), combine, collective or _connect_from_environment(), traces)

    return tf.autograph.experimental.do_not_convert(parallel)  # fn itself is converted when it is traced


class _Share(NamedTuple):
    """This rank's share of the samples; numbers, or tensors [] where the count is not known before the graph runs."""

    count: Any  # samples of all ranks
    size: Any  # samples of this rank
    # The samples that fn runs on here: this rank's, or the first of all if it has none.
    run_start: Any
    run_end: Any
    # Whether what fn returns here counts. Without samples at all it is fn's result for none, on the first rank.
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
        outputs = trace._call_flat(*_prepare(tensors, trace, share, collective, f"{name}/inputs"))
    with tf.control_dependencies(checks):
        parts = [tf.identity(output) for output in tf.nest.flatten(outputs)]
    return tf.nest.pack_sequence_as(outputs, _combine(parts, rules, share, collective, name))


def _read_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The inputs with their names, flat: tensors [n, ...], and other objects, which are passed on unchanged."""
    labelled = [(f"argument {i}", arg) for i, arg in enumerate(args)]
    labelled += [(repr(name), kwargs[name]) for name in sorted(kwargs)]  # as tf.nest flattens a dict
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
    """The function as a TensorFlow ConcreteFunction of any number of samples.

    Its ``_call_flat`` takes the tensors that the function uses besides its inputs as further inputs: the one way to
    learn which they are, and to put an operation between them and the function.
    """
    like = tf.nest.map_structure(_to_spec, inputs)  # the trace must not keep the tensors alive
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
    # A tensor of the surrounding code may be another one at the next call, whereas a variable stays what it is.
    if tf.executing_eagerly() and all(tensor.dtype == tf.resource for tensor in trace.captured_inputs):
        traces[key] = trace
    return trace


def _to_spec(leaf: Any) -> Any:
    """The spec of any number of samples like these."""
    if not isinstance(leaf, tf.Tensor):
        return leaf
    return tf.TensorSpec([None, *leaf.shape[1:]] if leaf.shape.rank else None, leaf.dtype)


def _prepare(inputs: Tensors, trace: Any, share: _Share, collective: Collective, name: str) -> tuple[Tensors, Tensors]:
    """The arguments of the trace: this rank's slices, and the tensors that the function captures.

    A variable is used by its handle, so that ``spread`` stands before all reads of it.
    """

    def cut(whole: tf.Tensor) -> tf.Tensor:
        return whole[share.run_start : share.run_end]

    for variable in trace.graph.variables:
        variable_accessed(variable)  # tapes notice a variable when it is read, which is too late here
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
    """True if a tape may ask for its gradient: one that watches it, or, in a graph, one outside of the graph."""
    if not is_differentiable(tensor):
        return False
    return should_record_backprop([tensor]) or not (tf.executing_eagerly() or is_frozen)


def _check_words(combine: Any) -> None:
    for word in tf.nest.flatten(combine):
        if word not in RULES:
            raise UsageError(
                f"combine has {word!r}; each word must be 'concat', 'mean' or 'sum'. Give one for all outputs, or a "
                "structure of them that matches the outputs."
            )


def _rules_of(combine: Any, outputs: Any) -> list[str]:
    """The word for each flat output."""
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
    """See that each output can be combined as it shall be."""
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
    """The whole of each output. Collectives are called in the same order on every rank."""
    whole = list(parts)
    summed = [i for i, rule in enumerate(rules) if rule != "concat"]
    for i, part in enumerate(parts):
        if rules[i] == "concat":
            rows = tf.where(share.is_used, tf.shape(part)[0], 0)
            whole[i] = gather(part[:rows], collective, f"{name}/output_{i}")
        else:
            # By choosing, not by a factor of 0: what came of a sample that does not count may be infinite.
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
        # TensorFlow computes gradients that a tape outside of a function asks for in any order, and MPI agrees on none.
        raise UsageError("make_parallel joins the ranks by Horovod, which is not installed. Run: make setup HOROVOD=1")
    return connect("auto", world)
