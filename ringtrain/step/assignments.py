"""Variables that a forward pass assigns, found by recording the assignments.

Keras' lists of a model's variables lack some of them, such as the state of a stateful recurrent layer. There are three
kinds:

- shared state, such as BatchNorm's moving statistics: the ranks keep its mean over all samples;
- row state, such as that of a stateful recurrent layer: row i belongs to sample i of the batch, so that each rank keeps
  the state of its own rows;
- weights that a layer changes before it uses them, such as in spectral normalization.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ringtrain.errors import UsageError
from ringtrain.messages.rules import list_first
from ringtrain.run.variables import is_seed_state
from ringtrain.runtime.private import all_layers

# TensorFlow's operations that change a variable.
ASSIGNING_OPERATIONS = ("Assign", "ResourceScatter", "ResourceStridedSliceAssign")
# Their statistics belong to channels, also if there are as many channels as samples in a batch.
LAYERS_WITH_STATISTICS = (
    keras.layers.BatchNormalization,
    keras.layers.SpectralNormalization,
)


class AssignedWeight(NamedTuple):
    """A trained weight that the forward pass has replaced by ``value``."""

    weight: keras.Variable
    value: tf.Tensor


class RecordingScope(keras.StatelessScope):
    """A stateless scope that also records the variables that the code inside assigns.

    Attributes:
        assigned: these variables, in the order of their first assignment.
        assigned_weights: every assignment of a trained weight. As in plain Keras, the gradient of such a weight is that
            of its new value, and does not pass through the assignment.
    """

    def __init__(
        self,
        values: Sequence[tuple[keras.Variable, Any]],
        *,
        tape: tf.GradientTape,
        trained: Sequence[keras.Variable],
        derive_seed: Callable[[int, keras.Variable], tf.Tensor],
    ) -> None:
        """``derive_seed`` gives the state of generator 0, 1, ... of those that are not in ``values``."""
        super().__init__(values, collect_losses=True, initialize_variables=False)
        self.assigned: list[keras.Variable] = []
        self.assigned_weights: list[AssignedWeight] = []
        self._tape = tape
        self._trained_ids = {id(weight) for weight in trained}
        self._derive_seed = derive_seed
        self._num_unlisted_seeds = 0

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Return the value inside the scope; Keras calls this.

        A generator that Keras does not list, such as the one of draws without a seed, would repeat its numbers in each
        step.
        """
        value = super().get_current_value(variable)
        if value is None and is_seed_state(variable):
            value = self._derive_seed(self._num_unlisted_seeds, variable)
            self._num_unlisted_seeds += 1
            super().add_update((variable, value))
        return value

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Record an assignment; Keras calls this."""
        variable, value = update
        if id(variable) in self._trained_ids:
            value = tf.stop_gradient(value)
            self._tape.watch(value)
            self.assigned_weights.append(AssignedWeight(variable, value))
        if not any(variable is other for other in self.assigned):
            self.assigned.append(variable)
        super().add_update((variable, value))


class RowStateRule:
    """Decides which variables hold a row for each sample of a batch."""

    def __init__(self, model: keras.Model, local_batch_size: int | None) -> None:
        """``local_batch_size``: of most batches; None if it is not known."""
        layers = all_layers(model)
        self._listed_ids = {id(variable) for variable in model.variables}
        self._state_ids = {id(state) for state in states_of_stateful_layers(model)}
        self._statistics_ids = {
            id(variable)
            for layer in layers
            if isinstance(layer, LAYERS_WITH_STATISTICS)
            for variable in layer.non_trainable_variables
        }
        self._fixed_batch_size = find_fixed_batch_size(model)
        self._local_batch_size = self._fixed_batch_size or local_batch_size

    def applies_to(self, variable: keras.Variable) -> bool:
        """Return True for row state.

        A variable that Keras lists is one only in a model with a fixed batch size: otherwise it could not have as many
        rows as any batch.
        """
        if id(variable) in self._state_ids:
            return True
        if id(variable) in self._statistics_ids or len(variable.shape) == 0:
            return False
        if variable.shape[0] != self._local_batch_size:
            return False
        is_listed = id(variable) in self._listed_ids
        return not is_listed or self._fixed_batch_size is not None


def states_of_stateful_layers(model: keras.Model) -> list[keras.Variable]:
    """Return the states of Keras' recurrent layers with ``stateful=True``."""
    states = []
    for layer in all_layers(model):
        if getattr(layer, "stateful", False):
            states += tf.nest.flatten(getattr(layer, "states", None) or [])
    return [state for state in states if isinstance(state, keras.Variable)]


def find_fixed_batch_size(model: keras.Model) -> int | None:
    """Return the batch size that ``keras.Input(batch_shape=...)`` fixes, if it does."""
    inputs = tf.nest.flatten(getattr(model, "inputs", None) or [])
    for tensor in inputs:
        if len(tensor.shape) > 0 and tensor.shape[0] is not None:
            return int(tensor.shape[0])
    return None


def find_state(scope: RecordingScope, model: keras.Model) -> list[keras.Variable]:
    """Return assigned variables that the next step depends on.

    These are neither dropout's seeds, which follow from the step, nor the sums of Keras' metrics.
    """
    metric_ids = {id(variable) for variable in model.metrics_variables}
    return [variable for variable in scope.assigned if not is_seed_state(variable) and id(variable) not in metric_ids]


def refuse_tensorflow_variables(graph: Any) -> None:
    """Refuse a forward pass, with this graph, that assigns a ``tf.Variable``, which no scope can hold back.

    Raises:
        UsageError: it names the operation, which begins with the layer's name.
    """
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += function.node_def
    names = [node.name for node in nodes if node.op.startswith(ASSIGNING_OPERATIONS)]
    if names:
        raise UsageError(
            f"the forward pass assigns a TensorFlow variable, by {list_first(names)}. Ringtrain can neither average it "
            "over the ranks, nor save it, nor leave it unchanged in a skipped step. Make it a Keras variable: "
            "self.add_weight(shape=..., trainable=False) in the layer's build()."
        )


@contextlib.contextmanager
def keeping_values(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Restore the variables' values at the end."""
    values = [tf.identity(variable.value) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
