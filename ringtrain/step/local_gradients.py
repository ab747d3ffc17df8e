"""The local part of a step: gradients and sums, of this rank's part of the global objective."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ringtrain.collectives.differentiable import noting_calls
from ringtrain.config import Config
from ringtrain.data.pipeline import Batch
from ringtrain.errors import UsageError
from ringtrain.guard.labels import Labels, find_labels_of
from ringtrain.run.variables import is_seed_state
from ringtrain.step.assignments import (
    AssignedWeight,
    RecordingScope,
    RowStateRule,
    find_state,
    refuse_tensorflow_variables,
    states_of_stateful_layers,
)
from ringtrain.step.compiled import CompiledFunction
from ringtrain.step.loss_scale import LossScale
from ringtrain.step.report import NUM_SUMS, pack_sums
from ringtrain.step.state import empty_summands, is_integer_or_bool
from ringtrain.workloads.base import Workload
from ringtrain.workloads.stateful_metrics import NO_METRICS, StatefulMetrics
from ringtrain.workloads.values import call_model, needs_every_rank, per_sample


@dataclass(frozen=True, kw_only=True)
class StepStructure:
    """Facts from a trace, equal on all ranks; ranks without samples need them too."""

    metric_names: tuple[str, ...]
    sparse_index_dtypes: tuple[tf.DType | None, ...]  # per trainable variable; None: dense
    state: tuple[keras.Variable, ...]  # updated by the forward pass (BatchNorm's moving statistics)
    row_state: tuple[keras.Variable, ...]  # a row for each sample; never leaves its rank
    metric_state: tuple[keras.Variable, ...] = ()  # of stateful metrics; merged when a line is due


class Forward(NamedTuple):
    gradients: list[tf.Tensor | tf.IndexedSlices]
    sums: tf.Tensor  # control vector, [NUM_SUMS + metrics]
    state: list[tf.Tensor]
    row_state: list[tf.Tensor]  # empty for a rank without samples
    structure: StepStructure
    metric_state: list[tf.Tensor] = []  # noqa: RUF012 (never changed); empty for a rank without samples


class LocalGradients:
    def __init__(
        self,
        workload: Workload,
        config: Config,
        model: keras.Model,
        loss_scale: LossScale,
        *,
        dtype: tf.DType,
        rank: int,
        jit_compile: bool,
        local_batch_size: int | None = None,
        stateful_metrics: StatefulMetrics = NO_METRICS,
    ) -> None:
        """``dtype``: of losses and sums. ``jit_compile``: use XLA, which compiles no collectives.

        ``local_batch_size``: of most batches; None if it is not known.
        """
        self._stateful_metrics = stateful_metrics
        self._metric_state_ids = {id(variable) for variable in stateful_metrics.variables}
        self._workload, self._model, self._loss_scale = workload, model, loss_scale
        self._dtype, self._accumulate, self._seed, self._rank = dtype, config.accumulate, config.seed, rank
        self._seed_states = [v for v in model.non_trainable_variables if is_seed_state(v)]
        # Those of Keras' list, and those that a trace finds.
        self._fixed_or_state = [v for v in model.non_trainable_variables if not is_seed_state(v)]
        self._fixed_or_state += stateful_metrics.variables
        self._row_state_rule = RowStateRule(model, local_batch_size)
        self.needs_every_rank = needs_every_rank(workload, model)
        self.compiled: CompiledGradients | None = None
        if jit_compile:
            self.compiled = CompiledGradients(self._compute, model.trainable_variables)

    def __call__(self, batch: Batch, local_count: tf.Tensor) -> Forward:
        """``local_count`` is int64 []."""
        if self._accumulate == 1:
            before = self._values_before()
            forward = self._of_samples(batch, 0, local_count, before, tf.constant(0))
        else:
            forward = self._of_micro_batches(batch, local_count)
        return self._split_metric_state(forward)

    def _split_metric_state(self, forward: Forward) -> Forward:
        """Move the states of metrics, which stay on their rank, out of the shared state."""
        shared_variables = []
        shared_values = []
        metric_variables = []
        metric_values = []
        for variable, value in zip(forward.structure.state, forward.state, strict=True):
            if id(variable) in self._metric_state_ids:
                metric_variables.append(variable)
                metric_values.append(value)
            else:
                shared_variables.append(variable)
                shared_values.append(value)
        structure = dataclasses.replace(
            forward.structure, state=tuple(shared_variables), metric_state=tuple(metric_variables)
        )
        return forward._replace(state=shared_values, metric_state=metric_values, structure=structure)

    def _values_before(self) -> list[tf.Tensor]:
        """Return the values of ``_fixed_or_state`` before the step."""
        return [tf.convert_to_tensor(v.value) for v in self._fixed_or_state]

    def zero_gradients(self, batch: Batch, structure: StepStructure) -> Forward:
        """Zeros depend on the batch, each by its own factor.

        TensorFlow sees Horovod's operations as stateless: it would fold one with a constant input, and merge two with
        equal inputs, while other ranks wait.
        """
        nothing = tf.shape(batch.indices, tf.int64)[0]
        factors = itertools.count(1)

        def zeros(shape: Sequence[Any], dtype: tf.DType) -> tf.Tensor:
            return tf.zeros(shape, dtype) + tf.cast(nothing * next(factors), dtype)

        gradients = [
            tf.IndexedSlices(
                zeros([nothing, *v.shape[1:]], v.dtype), zeros([nothing], index_dtype), tf.constant(list(v.shape))
            )
            if index_dtype
            else zeros(v.shape, v.dtype)
            for v, index_dtype in zip(self._model.trainable_variables, structure.sparse_index_dtypes, strict=True)
        ]
        state = empty_summands(structure.state, zeros)
        sums = zeros([NUM_SUMS + len(structure.metric_names)], self._dtype)
        return Forward(gradients, sums, state, [], structure)

    def _of_samples(
        self, batch: Batch, start: Any, end: Any, state: Sequence[tf.Tensor], micro_batch: tf.Tensor
    ) -> Forward:
        x, y = batch.x, batch.y
        if self._accumulate > 1:
            x, y = tf.nest.map_structure(lambda tensor: tensor[start:end], (x, y))
        compute = self._compute if self.compiled is None else self.compiled
        return compute((x, y), end - start, batch.global_count, batch.step, micro_batch, list(state))

    def _compute(
        self,
        samples: Any,
        count: tf.Tensor,
        global_count: tf.Tensor,
        step: tf.Tensor,
        micro_batch: tf.Tensor,
        state: list[tf.Tensor],
    ) -> Forward:
        x, y = samples
        count, global_count = tf.cast(count, self._dtype), tf.cast(global_count, self._dtype)
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            values = [
                *((v, v) for v in variables),
                *zip(self._fixed_or_state, state, strict=True),
                *zip(self._seed_states, self._dropout_seeds(step, micro_batch), strict=True),
            ]

            def derive_seed(number: int, variable: keras.Variable) -> tf.Tensor:
                return self._derive_seed(len(self._seed_states) + number, variable, step, micro_batch)

            # Keeps updates of the forward pass (BatchNorm's statistics), which a non-finite step discards.
            with RecordingScope(values, tape=tape, trained=variables, derive_seed=derive_seed) as scope:
                with noting_calls() as calls:
                    outputs = call_model(self._workload, self._model, x, training=True)
                    losses, metrics = per_sample(self._workload, y, outputs)
                    self._stateful_metrics.update(y, outputs)
                self._require_every_rank(calls)
                regularization = tf.add_n(
                    [tf.zeros([], self._dtype), *(tf.cast(loss, self._dtype) for loss in self._model.losses)]
                )
            data_loss_sum = tf.reduce_sum(tf.cast(losses, self._dtype))
            scaled_objective = self._loss_scale.scale(
                partial_objective(data_loss_sum, regularization, count=count, global_count=global_count)
            )
        found = gradients_of_weights(tape, scaled_objective, variables, scope.assigned_weights)
        require_a_gradient(self._workload, found)
        gradients = []
        for number, (v, gradient) in enumerate(zip(variables, found, strict=True), start=1):
            if gradient is None:  # TensorFlow does not know that step >= 0 (see ``zero_gradients``)
                gradient = tf.zeros(v.shape, v.dtype) + tf.cast(tf.minimum(step, 0) * number, v.dtype)
            # Fusion depends on the static shape, and ranks without samples know only the variables.
            elif not isinstance(gradient, tf.IndexedSlices):
                gradient.set_shape(v.shape)  # unknown after a user-defined gradient, for example
            gradients.append(gradient)
        refuse_tensorflow_variables(data_loss_sum.graph)
        structure = self._find_structure(scope, gradients, metrics)
        metric_sums = [tf.reduce_sum(tf.cast(metrics[name], self._dtype)) for name in structure.metric_names]
        sums = pack_sums(count, data_loss_sum, regularization, metric_sums)
        new_state = [scope.get_current_value(v) for v in structure.state]
        new_row_state = [scope.get_current_value(v) for v in structure.row_state]
        return Forward(gradients, sums, new_state, new_row_state, structure)

    def _require_every_rank(self, calls: Sequence[str]) -> None:
        """Ranks without samples would not join them."""
        if calls and not self.needs_every_rank:
            name = type(self._workload).__name__
            raise UsageError(
                f"{name} calls ringtrain.all_gather, but its needs_every_rank is False: a rank without samples would "
                f"not take part. Write needs_every_rank = True in the class {name}, or in that of the layer "
                "that calls it."
            )

    def _of_micro_batches(self, batch: Batch, num_samples: tf.Tensor) -> Forward:
        """Sum over micro-batches (equal, the last smaller or empty); a tf.while_loop saves memory."""
        self._refuse_micro_batches_of_rows(states_of_stateful_layers(self._model))
        size = -(-num_samples // self._accumulate)
        before = self._values_before()
        first = self._of_samples(batch, 0, tf.minimum(size, num_samples), before, tf.constant(0))
        self._refuse_micro_batches_of(first.structure)
        before = self._values_before()  # also of state that this first trace has found

        def add(number: tf.Tensor, gradients: list[Any], sums: tf.Tensor, updated: list[tf.Tensor]) -> tuple[Any, ...]:
            start = tf.minimum(tf.cast(number, tf.int64) * size, num_samples)
            # Integers count steps: the number of micro-batches may differ between ranks.
            newest = {
                id(v): value
                for v, value in zip(first.structure.state, updated, strict=True)
                if not self._counts_steps(v)
            }
            state = [newest.get(id(v), value) for v, value in zip(self._fixed_or_state, before, strict=True)]
            more = self._of_samples(batch, start, tf.minimum(start + size, num_samples), state, number)
            gradients = [_add(a, _unpack(b)) for a, b in zip(gradients, more.gradients, strict=True)]
            updated = [
                old if self._counts_steps(v) else new
                for v, old, new in zip(first.structure.state, updated, more.state, strict=True)
            ]
            return number + 1, gradients, sums + more.sums, updated

        gradients = [_unpack(gradient) for gradient in first.gradients]
        loop_variables = (tf.constant(1), gradients, first.sums, first.state)
        shapes = tf.nest.map_structure(lambda t: t.shape, loop_variables)
        shapes[1][:] = [  # the number of sparse rows may grow
            tuple(tf.TensorShape([None, *part.shape[1:]]) for part in g) if isinstance(g, tuple) else g.shape
            for g in gradients
        ]
        # In a collective forward pass, empty micro-batches run too, in order: TensorFlow orders stateful operations.
        asked = tf.nest.flatten(loop_variables) if self.needs_every_rank else []
        with tf.control_dependencies(asked):
            _, gradients, sums, state = tf.while_loop(
                lambda number, *_: self.needs_every_rank or tf.cast(number, tf.int64) * size < num_samples,
                add,
                loop_variables,
                shape_invariants=shapes,
                parallel_iterations=1,
                maximum_iterations=self._accumulate - 1,
            )
        packed = [
            tf.IndexedSlices(*g, tf.constant(list(v.shape))) if isinstance(g, tuple) else g
            for g, v in zip(gradients, self._model.trainable_variables, strict=True)
        ]
        return Forward(packed, sums, state, [], first.structure)

    def _counts_steps(self, variable: keras.Variable) -> bool:
        """Return True for state that only the first micro-batch of a step updates."""
        return is_integer_or_bool(variable) and id(variable) not in self._metric_state_ids

    def _refuse_micro_batches_of(self, structure: StepStructure) -> None:
        """Refuse state that micro-batches would mix up, by its name.

        Raises:
            UsageError: row state, or a weight that the forward pass changes.
        """
        self._refuse_micro_batches_of_rows(structure.row_state)
        trained_ids = {id(weight) for weight in self._model.trainable_variables}
        for variable in structure.state:
            if id(variable) in trained_ids:
                raise UsageError(
                    f"--accumulate {self._accumulate}: the forward pass changes the weight {variable.path}, and all "
                    "micro-batches of a step must use the same weights. Leave --accumulate out."
                )

    def _refuse_micro_batches_of_rows(self, row_state: Sequence[keras.Variable]) -> None:
        if row_state:
            raise UsageError(
                f"--accumulate {self._accumulate}: {row_state[0].path} holds a row for each sample of a batch, and the "
                "micro-batches of a step hold different samples. Leave --accumulate out."
            )

    def _find_structure(
        self, scope: RecordingScope, gradients: Sequence[Any], metrics: dict[str, Any]
    ) -> StepStructure:
        """Also add newly found shared state to ``_fixed_or_state``."""
        state = []
        row_state = []
        for variable in find_state(scope, self._model):
            if self._row_state_rule.applies_to(variable):
                row_state.append(variable)
            else:
                state.append(variable)
        known_ids = {id(variable) for variable in [*self._fixed_or_state, *self._model.trainable_variables]}
        self._fixed_or_state += [variable for variable in state if id(variable) not in known_ids]
        return StepStructure(
            metric_names=tuple(sorted(metrics)),
            sparse_index_dtypes=tuple(g.indices.dtype if isinstance(g, tf.IndexedSlices) else None for g in gradients),
            state=tuple(state),
            row_state=tuple(row_state),
        )

    def _dropout_seeds(self, step: tf.Tensor, micro_batch: tf.Tensor) -> list[tf.Tensor]:
        """Derive the states of the generators that Keras lists."""
        return [
            self._derive_seed(number, variable, step, micro_batch) for number, variable in enumerate(self._seed_states)
        ]

    def _derive_seed(self, number: int, variable: keras.Variable, step: tf.Tensor, micro_batch: tf.Tensor) -> tf.Tensor:
        """Derive a generator's state from (seed, number of the generator, rank, step, micro-batch)."""
        key = tf.constant([self._seed % 2**31, number], tf.int32)
        for part in (self._rank, step, micro_batch):
            key = tf.random.experimental.stateless_fold_in(key, tf.cast(part, tf.int32))
        return tf.cast(tf.bitwise.bitwise_and(key, 2**31 - 1), variable.dtype)

    @contextlib.contextmanager
    def drawing_as(self, rank: int) -> Iterator[None]:
        """Draw the random numbers of another rank in this scope."""
        own_rank = self._rank
        self._rank = rank
        try:
            yield
        finally:
            self._rank = own_rank


class CompiledGradients:
    def __init__(self, compute: Callable[..., Forward], variables: Sequence[keras.Variable]) -> None:
        """``compute`` gets (x, y), then (lists of) tensors; ``variables``: of its gradients."""
        self._compute, self._variables = compute, variables
        self.labels: Sequence[Labels] = ()
        self._structure: StepStructure | None = None
        self.function = CompiledFunction(self._trace)

    def __call__(self, *arguments: Any) -> Forward:
        gradients, sums, state, row_state = self.function(*arguments)
        assert self._structure is not None
        gradients = list(map(with_known_rows, gradients, self._variables))
        return Forward(gradients, sums, state, row_state, self._structure)

    def _trace(self, samples: Any, *others: Any) -> tuple[Any, ...]:
        forward = self._compute(samples, *others)
        self._structure = forward.structure
        self.labels = sorted({*self.labels, *find_labels_of(forward.sums.graph, tf.nest.flatten(samples[1]))})
        return forward.gradients, forward.sums, forward.state, forward.row_state


def gradients_of_weights(
    tape: tf.GradientTape,
    objective: tf.Tensor,
    weights: Sequence[keras.Variable],
    assigned: Sequence[AssignedWeight],
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """Return the gradient of each weight; None if it has no influence.

    As in plain Keras, that of a weight that the forward pass has ``assigned`` counts its old and its new values.
    """
    sources = [weight.value for weight in weights] + [each.value for each in assigned]
    found = tape.gradient(objective, sources)
    gradients = found[: len(weights)]
    position_of = {id(weight): position for position, weight in enumerate(weights)}
    for each, gradient in zip(assigned, found[len(weights) :], strict=True):
        position = position_of[id(each.weight)]
        parts = [part for part in (gradients[position], gradient) if part is not None]
        if len(parts) == 2:
            gradients[position] = tf.add_n([tf.convert_to_tensor(part) for part in parts])
        elif parts:
            gradients[position] = parts[0]
    return gradients


def _unpack(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """A loop cannot carry IndexedSlices."""
    return (gradient.values, gradient.indices) if isinstance(gradient, tf.IndexedSlices) else gradient


def _add(a: Any, b: Any) -> Any:
    """Concatenate sparse rows."""
    if isinstance(a, tuple):
        return tuple(tf.concat([left, right], axis=0) for left, right in zip(a, b, strict=True))
    return a + b


def partial_objective(
    data_loss_sum: tf.Tensor, regularization: tf.Tensor, *, count: tf.Tensor, global_count: tf.Tensor
) -> tf.Tensor:
    """A rank's objective; the sum over ranks is (mean loss of the global batch) + regularization."""
    return data_loss_sum / global_count + regularization * (count / global_count)


def require_a_gradient(workload: Workload, gradients: Sequence[Any]) -> None:
    if all(gradient is None for gradient in gradients):
        raise UsageError(
            f"{type(workload).__name__}.loss gives a loss on which no weight of the model has any influence: nothing "
            "would be trained. Compute it from the outputs, without what has no gradient, such as tf.argmax, tf.round "
            "or .numpy()."
        )


def with_known_rows(gradient: Any, variable: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(list(variable.shape)))
