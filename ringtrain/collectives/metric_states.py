"""The states of Keras metrics, merged over ranks so that a result is that of one process.

A metric keeps its state in variables. Keras' own metrics add to them, so the states of several ranks are summed. For
other classes the update is traced once: a variable that only ever becomes ``v + f(batch)``, ``maximum(v, f(batch))`` or
``minimum(v, f(batch))`` is summed, or its largest or smallest value is taken. A class with ``merge_state(metrics)``, as
in Keras 2, merges its states itself. Any other state cannot be merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from ringtrain.collectives.base import Collective
from ringtrain.collectives.objects import all_gather_object
from ringtrain.errors import UsageError

Array = npt.NDArray[Any]
Reduction = Literal["sum", "max", "min"]
COMBINE: dict[Reduction, Callable[[Sequence[Array]], Array]] = {
    "sum": lambda values: np.sum(values, axis=0),
    "max": lambda values: np.max(values, axis=0),
    "min": lambda values: np.min(values, axis=0),
}
BINARY_OPERATIONS: dict[str, Reduction] = {
    "Add": "sum",
    "AddV2": "sum",
    "Maximum": "max",
    "Minimum": "min",
}
MARK = "_ringtrain_merging"  # attribute of a metric whose update was traced


@dataclass(frozen=True)
class Merging:
    """The rule by which the states of the ranks become one state.

    Attributes:
        reductions: one for each variable of the metric, in the order of ``metric.variables``; None: ``merge_state``
            or unknown.
        has_merge_state: True if the metric's class merges its states by ``merge_state``.
        reason: why the states cannot be merged; empty if they can.
    """

    reductions: tuple[Reduction, ...] | None = None
    has_merge_state: bool = False
    reason: str = ""

    @property
    def is_sum(self) -> bool:
        """True if the states of all ranks are added."""
        return self.reductions is not None and set(self.reductions) <= {"sum"}


@dataclass(frozen=True)
class MetricState:
    """A metric with a copy of its variables' values, in the order of ``metric.variables``."""

    metric: keras.metrics.Metric
    values: list[Array]


def leaf_metrics(metrics: Sequence[keras.metrics.Metric]) -> list[keras.metrics.Metric]:
    """Return the metrics without Keras' container of those given to ``compile``, but with its contents."""
    leaves: list[keras.metrics.Metric] = []
    for metric in metrics:
        contents = getattr(metric, "metrics", None)
        leaves += [metric] if contents is None else leaf_metrics(contents)
    return leaves


def read_states(metrics: Sequence[keras.metrics.Metric]) -> list[MetricState]:
    """Copy the local states of metrics."""
    return [MetricState(metric, [read_value(v) for v in metric.variables]) for metric in metrics]


def read_value(variable: Any) -> Array:
    return np.asarray(keras.ops.convert_to_numpy(variable.value))


def write_states(states: Sequence[MetricState]) -> None:
    """Set the variables of metrics to these values."""
    for state in states:
        for variable, value in zip(state.metric.variables, state.values, strict=True):
            variable.assign(value.astype(variable.dtype))


def merging_of(metric: keras.metrics.Metric) -> Merging:
    """Return how the metric's states merge.

    A metric of a user-defined class without ``merge_state`` needs an earlier ``trace_merging`` or ``watch_updates``.
    """
    traced = vars(metric).get(MARK)
    if traced is not None:
        return traced
    if callable(getattr(metric, "merge_state", None)):
        return Merging(has_merge_state=True)
    if is_sum_by_keras(metric):
        sums: list[Reduction] = ["sum"] * len(metric.variables)
        return Merging(reductions=tuple(sums))
    return Merging(reason="its update was not traced")


def is_sum_by_keras(metric: keras.metrics.Metric) -> bool:
    """True if Keras itself updates and resets the state. All of Keras' metrics add to their variables."""
    return all(
        getattr(type(metric), method).__module__.startswith("keras.") for method in ("update_state", "reset_state")
    )


def needs_trace(metric: keras.metrics.Metric) -> bool:
    """True if only a trace of the metric's update can show how its states merge."""
    return MARK not in vars(metric) and not is_sum_by_keras(metric) and not hasattr(metric, "merge_state")


def trace_merging(metric: keras.metrics.Metric, *arguments: Any, **keywords: Any) -> Merging:
    """Find out how the states merge from a trace of ``metric.update_state(*arguments, **keywords)``.

    Args:
        metric: its variables exist already.
        arguments, keywords: tensors, of which only the types and shapes matter, in any structure.
    """
    try:
        merging = _merging_of_update(metric, arguments, keywords)
    except Exception as error:  # a user-defined class may have code that cannot be traced
        first_line = (str(error).splitlines() or [""])[0]
        merging = Merging(reason=f"its update cannot be traced: {type(error).__name__}: {first_line}")
    object.__setattr__(metric, MARK, merging)  # Keras' __setattr__ would track the value
    return merging


def watch_updates(metrics: Sequence[keras.metrics.Metric]) -> None:
    """Trace the next update of each metric that needs it, also of those that a container creates in its first update.

    The metric's ``update_state`` is replaced until it is called.
    """
    for metric in metrics:
        is_container = hasattr(metric, "metrics")
        is_watched = "update_state" in vars(metric)
        if not is_watched and (is_container or needs_trace(metric)):
            object.__setattr__(metric, "update_state", _watched_update(metric, is_container=is_container))


def _watched_update(metric: keras.metrics.Metric, *, is_container: bool) -> Callable[..., Any]:
    plain_update = metric.update_state

    def update_state(*arguments: Any, **keywords: Any) -> Any:
        object.__delattr__(metric, "update_state")
        if is_container:
            if not metric.built:
                metric.build(*arguments[:2])  # y_true, y_pred
            watch_updates(metric.metrics)
            return plain_update(*arguments, **keywords)
        result = plain_update(*arguments, **keywords)
        with tf.init_scope():
            trace_merging(metric, *arguments, **keywords)
        return result

    return update_state


def _merging_of_update(metric: keras.metrics.Metric, arguments: Any, keywords: Any) -> Merging:
    if not metric.variables:
        return Merging(reason="it keeps its state in no variable")
    leaves = tf.nest.flatten((arguments, keywords))
    is_tensor = [tf.is_tensor(leaf) or isinstance(leaf, np.ndarray) for leaf in leaves]
    tensor_specs = [tf.type_spec_from_value(leaf) for leaf, is_one in zip(leaves, is_tensor, strict=True) if is_one]
    state_specs = [tf.TensorSpec(v.shape, v.dtype) for v in metric.variables]

    def update(states: list[tf.Tensor], tensors: list[Any]) -> list[tf.Tensor]:
        remaining = iter(tensors)
        traced = [next(remaining) if is_one else leaf for leaf, is_one in zip(leaves, is_tensor, strict=True)]
        packed_arguments, packed_keywords = tf.nest.pack_sequence_as((arguments, keywords), traced)
        updated = metric.stateless_update_state(states, *packed_arguments, **packed_keywords)
        return [tf.convert_to_tensor(value) for value in updated]

    graph = tf.function(update, autograph=False).get_concrete_function(state_specs, tensor_specs).graph
    old_states = graph.inputs[: len(state_specs)]
    reset_values = metric.stateless_reset_state()
    reductions: list[Reduction] = []
    for variable, old, new, reset_value in zip(metric.variables, old_states, graph.outputs, reset_values, strict=True):
        reduction = _reduction_of(new, old, old_states)
        name = variable.path
        if reduction is None:
            return Merging(reason=f"its variable {name!r} is no sum, maximum or minimum over the samples")
        if reduction == "sum" and np.any(np.asarray(keras.ops.convert_to_numpy(reset_value))):
            return Merging(reason=f"its variable {name!r} is a sum that does not begin at 0")
        reductions.append(reduction)
    return Merging(reductions=tuple(reductions))


def _reduction_of(new: tf.Tensor, old: tf.Tensor, all_old: Sequence[tf.Tensor]) -> Reduction | None:
    """Return r if ``new`` is ``old r f(batch)``, for an f that depends on no state; None if it has another form.

    A state that no update changes is equal on all ranks, and its maximum is itself.
    """
    reductions: set[Reduction] = set()
    while new is not old:
        operation = new.op
        if operation.type == "Identity":
            new = operation.inputs[0]
            continue
        reduction = BINARY_OPERATIONS.get(operation.type)
        if reduction is None:
            return None
        dependent = [part for part in operation.inputs if _depends_on(part, all_old)]
        if len(dependent) != 1:
            return None
        reductions.add(reduction)
        new = dependent[0]
    if len(reductions) > 1:
        return None
    return reductions.pop() if reductions else "max"


def _depends_on(tensor: tf.Tensor, sources: Sequence[tf.Tensor]) -> bool:
    return any(found is source for found in _ancestors(tensor) for source in sources)


def _ancestors(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yield the tensor and all that it is computed from in its graph."""
    waiting = [tensor]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += current.op.inputs
        for control in current.op.control_inputs:
            waiting += control.inputs


def require_same_metrics(metrics: Sequence[keras.metrics.Metric], collective: Collective, *, name: str) -> None:
    """Refuse ranks whose metrics have other names, shapes or merging: by position they would be mixed. Collective.

    Raises:
        UsageError: it names the ranks and the first difference.
    """
    facts = [
        [metric.name, [list(v.shape) for v in metric.variables], merging_of(metric).reductions] for metric in metrics
    ]
    require_same_list(facts, [metric.name for metric in metrics], collective, name=name, kind="metrics")


def require_same_list(
    facts: Sequence[Any], names: Sequence[str], collective: Collective, *, name: str, kind: str
) -> None:
    """Compare what is exchanged by position. ``names``: one for each fact. Collective.

    Raises:
        UsageError: the facts differ between ranks.
    """
    of_ranks = all_gather_object(collective, [list(facts), list(names)], name=name)
    first_facts, first_names = of_ranks[0]
    for rank, (rank_facts, rank_names) in enumerate(of_ranks):
        if rank_facts == first_facts:
            continue
        remedy = f"Pass the same {kind} and validation_data to compile() and fit() on every rank."
        if rank_names != first_names:
            raise UsageError(
                f"the ranks have different {kind}: rank 0 has {', '.join(first_names) or 'none'}, rank {rank} has "
                f"{', '.join(rank_names) or 'none'}. {remedy}"
            )
        pairs = zip(first_names, first_facts, rank_facts, strict=True)
        different = next(label for label, mine, other in pairs if mine != other)
        raise UsageError(f"{kind}: {different!r} has another state on rank {rank} than on rank 0. {remedy}")


def merge_states(states: Sequence[MetricState], collective: Collective, *, name: str) -> list[MetricState]:
    """Merge each metric's states of all ranks; those that cannot be merged are unchanged. Collective.

    The metrics are the same on all ranks (``require_same_metrics``). Sums are added in float64.
    """
    merged = [MetricState(state.metric, list(state.values)) for state in states]
    mergings = [merging_of(state.metric) for state in states]
    _sum_over_ranks(merged, mergings, collective, name=name)
    others = [index for index, merging in enumerate(mergings) if not (merging.is_sum or merging.reason)]
    if not others:
        return merged
    local = [[value.astype(np.float64).tolist() for value in merged[index].values] for index in others]
    of_ranks = all_gather_object(collective, local, name=f"{name}/others")
    for position, index in enumerate(others):
        by_rank = [[np.asarray(value, np.float64) for value in rank_values[position]] for rank_values in of_ranks]
        merged[index] = MetricState(merged[index].metric, _combine(merged[index].metric, mergings[index], by_rank))
    return merged


def _sum_over_ranks(
    states: Sequence[MetricState], mergings: Sequence[Merging], collective: Collective, *, name: str
) -> None:
    """Replace the values of all states that are sums, in one all-reduce. Collective."""
    summed = [state for state, merging in zip(states, mergings, strict=True) if merging.is_sum]
    values = [value for state in summed for value in state.values]
    flat = np.concatenate([np.zeros(1), *(value.ravel().astype(np.float64) for value in values)])
    [total] = collective.all_reduce([tf.constant(flat)], name=name)
    remaining = total.numpy()[1:]
    for state in summed:
        for number, value in enumerate(state.values):
            state.values[number] = remaining[: value.size].reshape(value.shape)
            remaining = remaining[value.size :]


def _combine(metric: keras.metrics.Metric, merging: Merging, by_rank: Sequence[Sequence[Array]]) -> list[Array]:
    """Merge one metric's values [ranks][variables]."""
    if merging.reductions is not None:
        by_variable = zip(*by_rank, strict=True)
        return [COMBINE[reduction](values) for reduction, values in zip(merging.reductions, by_variable, strict=True)]
    own_state = read_states([metric])
    copies = [_copy_with_state(metric, values) for values in by_rank]
    try:
        metric.reset_state()
        metric.merge_state(copies)
        return read_states([metric])[0].values
    finally:
        write_states(own_state)


def _copy_with_state(metric: keras.metrics.Metric, values: Sequence[Array]) -> keras.metrics.Metric:
    copy = type(metric).from_config(metric.get_config())
    if len(copy.variables) != len(values):
        raise UsageError(
            f"the metric {metric.name!r} merges its states by merge_state, but a new {type(metric).__name__} has "
            f"{len(copy.variables)} variables and the trained one {len(values)}. Create all variables in __init__."
        )
    write_states([MetricState(copy, list(values))])
    return copy
