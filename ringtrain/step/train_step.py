"""One training step, compiled: forward, backward, reduction, finite check, update.

Each rank computes the gradient of the sum of its samples' losses over the planned number of samples of the *global*
batch; the sum of that over the ranks is the gradient of the mean over the global batch, exactly, however ragged the
ranks' shares are. The control vector is reduced with the gradients: a few sums that say how the step went; every
decision is taken from these reduced numbers, which are the same on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives.base import MARK, Collective
from ringtrain.collectives.gradients import GradientReduction
from ringtrain.config import Config, Precision
from ringtrain.data.pipeline import Batch
from ringtrain.errors import UsageError
from ringtrain.guard.labels import find_labels
from ringtrain.run.variables import broadcast_variables, name_variables, named_slots, named_weights
from ringtrain.step.averages import WeightAverages
from ringtrain.step.compiled import MAX_NAMED
from ringtrain.step.local_gradients import Forward, LocalGradients, StepStructure
from ringtrain.step.loss_scale import LossScale
from ringtrain.step.report import CONTROL_SUMS, NUM_EXTRA_SCALARS, STEP_FACTS, StepReport, read_report, read_value
from ringtrain.step.sharding import ShardedOptimizer
from ringtrain.step.state import from_sums, require_equal_state, to_summands
from ringtrain.workloads.base import Workload

Found = TypeVar("Found")
PYTHON_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
SCALARS = (tf.TensorSpec([], tf.float64), tf.TensorSpec([NUM_EXTRA_SCALARS], tf.float64))  # the learning rate, others


class TrainStep:
    """Trains a model on one global batch at a time.

    Call it with this rank's ``Batch`` and the learning rate, then hand what it returns to ``read``.
    """

    def __init__(
        self,
        *,
        workload: Workload,
        config: Config,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        reduction: GradientReduction,
        batch_spec: Batch,
        local_batch_size: int | None = None,
        times_communication: bool = False,
        jit_compile: bool = False,
    ) -> None:
        """Trace the step, for batches of ``batch_spec``; almost all of this rank's have ``local_batch_size`` samples.

        ``times_communication``: take the moments for ``communication_sec``. TensorFlow refuses that where it is to be
        deterministic; of what a GPU computes the host knows none, and to ask would let it wait. ``jit_compile``: let
        XLA compile the forward and backward pass, unless a layer asks other ranks in it.
        """
        self.model, self.optimizer = model, optimizer
        self.loss_scale = LossScale(is_dynamic=config.precision == "mixed_float16")
        self.averages = WeightAverages(model.trainable_variables, decay=config.optimizer.ema)
        self._dtype = tf.float64 if config.precision == "float64" else tf.float32
        self._local_batch_size, self.times_communication = local_batch_size, times_communication
        self._follows_schedule = isinstance(optimizer.get_config().get("learning_rate"), float)
        self.sharded: ShardedOptimizer | None = None
        self._reduction = reduction
        if config.shard_optimizer and reduction.collective.world.size > 1:
            weights = model.trainable_variables
            self.sharded = ShardedOptimizer(optimizer, weights, reduction, control_dtype=self._dtype.name)
        else:
            optimizer.build(model.trainable_variables)
        # A known number of samples saves the gradient of each addition the question whether anything was broadcast.
        usual_spec = batch_spec if local_batch_size is None else fix_batch_size(batch_spec, local_batch_size)
        self.not_compiled = ""  # why XLA does not compile what it was to, in words
        self._trace_usual(workload, config, usual_spec, reduction.collective.world.rank, jit_compile=jit_compile)
        self.compiled = self._local_gradients.compiled
        self.labels = self.compiled.labels if self.compiled else find_labels(self._train, batch_spec)
        self._train_any = tf.function(
            lambda batch, learning_rate, extra_scalars: self._train_samples(batch, learning_rate, extra_scalars)[0],
            input_signature=[batch_spec, *SCALARS],
            autograph=False,
        )
        self._join = tf.function(self._train_nothing, input_signature=[batch_spec, *SCALARS], autograph=False)
        self._look_again = tf.function(self._are_gradients_finite, input_signature=[batch_spec], autograph=False)

    def _trace_usual(self, workload: Workload, config: Config, spec: Batch, rank: int, *, jit_compile: bool) -> None:
        """Trace the step that most batches take; if XLA cannot compile it and need not, again without."""
        self._local_gradients = LocalGradients(
            workload, config, self.model, self.loss_scale, dtype=self._dtype, rank=rank, jit_compile=jit_compile
        )
        # The traced function is called as it is: to choose among traces takes longer than a small step's computation.
        self._train, self._structure = trace(self._train_samples, [spec, *SCALARS])
        if not jit_compile:
            return
        compiled, is_forced = self._local_gradients.compiled, config.jit_compile == "true"
        if compiled is None:
            self.not_compiled = "a layer asks the other ranks within its forward pass"
            return
        is_unknown = compiled.function.has_unknown_lengths
        if is_unknown and not is_forced:
            self.not_compiled = "the lengths of a sample are not known before, and it would compile each length"
        # Where lengths are not known it cannot be tried; Python is what XLA has under no length.
        elif why := ", ".join(self.python_operations()[:MAX_NAMED]) if is_unknown else compiled.function.why_not():
            if is_forced:
                raise UsageError(
                    f"jit_compile is true, but XLA has no way to compile {why}. Leave --jit_compile out, or compute "
                    "that by operations of TensorFlow's or Keras' that XLA has; in a source or augment() all are fine."
                )
            self.not_compiled = f"it has no way to compile {why}"
        if self.not_compiled:
            self._trace_usual(workload, config, spec, rank, jit_compile=False)

    def __call__(
        self, batch: Batch, learning_rate: float, *, is_stop_wanted: bool = False, next_count: int = 0
    ) -> tf.Tensor:
        """Train one step; every rank must call it for the same step.

        ``is_stop_wanted`` is this rank's vote to end the training after it; ``next_count`` are the samples that it has
        for the next one, if that is not known before. What returns are the control vector and the step's facts, for
        ``read``: computed once the device gets there.
        """
        function = self._function_for(batch)
        return function(batch, constant(learning_rate), constant((is_stop_wanted, next_count)))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The workload's metrics, in the order of their sums in the control vector."""
        return self._structure.metric_names

    @property
    def local_gradients(self) -> LocalGradients:
        """The forward and backward pass of a rank's samples."""
        return self._local_gradients

    @property
    def has_sparse_gradients(self) -> bool:
        """True if the gradient of some variable holds a few of its rows alone."""
        return any(self._structure.sparse_index_dtypes)

    @property
    def state(self) -> tuple[keras.Variable, ...]:
        """The variables that the model updates in its forward pass, such as moving statistics."""
        return self._structure.state

    def is_traced_for(self, batch: Batch) -> bool:
        """True if a step with this rank's batch begins at once; else TensorFlow traces a function for it before."""
        function = self._function_for(batch)
        return function is self._train or function.experimental_get_tracing_count() > 0

    def _function_for(self, batch: Batch) -> Any:
        """The function that computes the step, chosen by the number of samples."""
        num_samples = batch.indices.shape[0]
        if num_samples == self._local_batch_size or (num_samples and self._local_batch_size is None):
            return self._train
        return self._train_any if num_samples or self._local_gradients.needs_every_rank else self._join

    def python_operations(self) -> list[str]:
        """The operations of a usual step that call the workload's own Python code (``tf.py_function``), by name."""
        return python_operations(self._train.graph)

    @property
    def variables(self) -> list[keras.Variable]:
        """Variables that rank 0 broadcasts: all except dropout's seeds, which follow the step, and pieces of slots."""
        return list(self.named_variables.values())

    @property
    def named_variables(self) -> dict[str, keras.Variable]:
        """Variables that are equal on all ranks: weights, slots, averages, loss scale, such as ``weights/digits``."""
        sharded = self.sharded
        return {name: v for name, v in self._name_all().items() if sharded is None or not sharded.is_shared_out(v)}

    @property
    def named_pieces(self) -> dict[str, keras.Variable]:
        """This rank's pieces of the slots that are shared out, by the names of the whole slots."""
        return {name: v for name, v in self._name_all().items() if self.sharded and self.sharded.is_shared_out(v)}

    @property
    def shapes_of_shared_out(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and types of the whole slots that are shared out."""
        pieces = self.named_pieces.items() if self.sharded is not None else ()
        return {name: (self.sharded.shape_of(v), str(v.dtype)) for name, v in pieces if self.sharded is not None}

    @property
    def names(self) -> list[str]:
        """The names of all variables in a checkpoint, sharded or not."""
        return list(self._name_all())

    def gather_shared_out(self) -> dict[str, np.ndarray]:
        """Whole slots that are shared out, on rank 0 alone; every rank must call it."""
        return self.sharded.gather(self.named_pieces) if self.sharded is not None else {}

    def share_values(self, collective: Collective, slots: Mapping[str, np.ndarray] | None = None) -> None:
        """Give every rank rank 0's values; every rank must call it.

        ``slots`` are whole ones, of rank 0, if it resumes from a checkpoint; on the others only whether it does.
        """
        broadcast_variables(self.variables, collective)
        if self.sharded is not None:
            self.sharded.begin_from_weights()
            if slots is not None:
                self.sharded.scatter(self.named_pieces, slots)

    def _name_all(self) -> dict[str, keras.Variable]:
        """All that a checkpoint holds."""
        return name_variables(
            weights=named_weights(self.model),
            slots=named_slots(self.optimizer),
            averages=[(weight.path, average) for weight, average in self.averages.pairs],
            loss_scale=[(v.path, v) for v in self.loss_scale.variables],
        )

    def find_nonfinite_gradients(self, batch: Batch) -> list[str]:
        """The weights whose gradient by this rank's samples alone is not finite, in the order of the model.

        It computes the gradients of the batch again, and changes nothing. Every rank must call it.
        """
        if not (batch.indices.shape[0] or self._local_gradients.needs_every_rank):
            return []
        are_finite = self._look_again(batch).numpy()
        return [
            v.path for v, is_finite in zip(self.model.trainable_variables, are_finite, strict=True) if not is_finite
        ]

    def require_equal_state(self, returned: tf.Tensor, step: int) -> None:
        """Raise UsageError if the ranks computed different whole numbers for a variable of the model in this step."""
        require_equal_state(int(read_value(returned, "divergent_state")), self.state, step)

    def read(self, returned: tf.Tensor) -> StepReport:
        """Bring to the host what a call returned."""
        return read_report(returned, self.metric_names)

    def _train_samples(
        self, batch: Batch, learning_rate: tf.Tensor, extra_scalars: tf.Tensor
    ) -> tuple[tf.Tensor, StepStructure]:
        forward = self._compute_forward(batch)
        return self._reduce_and_update(forward, learning_rate, extra_scalars), forward.structure

    def _compute_forward(self, batch: Batch) -> Forward:
        """Gradients and sums of this rank's samples, and its part of the mean of the state."""
        local_count = tf.shape(batch.indices, tf.int64)[0]
        forward = self._local_gradients(batch, local_count)
        summands = to_summands(forward.state, local_count=local_count, global_count=batch.global_count)
        return forward._replace(state=summands)

    def _train_nothing(self, batch: Batch, learning_rate: tf.Tensor, extra_scalars: tf.Tensor) -> tf.Tensor:
        """The step of a rank whose share is empty."""
        forward = self._local_gradients.of_nothing(batch, self._structure)
        return self._reduce_and_update(forward, learning_rate, extra_scalars)

    def _are_gradients_finite(self, batch: Batch) -> tf.Tensor:
        """For each trainable variable, bool [variables]."""
        gradients = self._local_gradients(batch, tf.shape(batch.indices, tf.int64)[0]).gradients
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        return tf.stack([tf.reduce_all(tf.math.is_finite(value)) for value in values])

    def _reduce_and_update(self, forward: Forward, learning_rate: tf.Tensor, extra_scalars: tf.Tensor) -> tf.Tensor:
        end = len(CONTROL_SUMS)
        extra_scalars = tf.pad(
            tf.cast(extra_scalars, self._dtype), [[end - NUM_EXTRA_SCALARS, forward.sums.shape[0] - end]]
        )
        reduce = self._reduction if self.sharded is None else self.sharded.reduce
        # TensorFlow runs what is stateful in the order in which it is written here: a clock, a native sum.
        begin = moment_after([*forward.state, *forward.gradients]) if self.times_communication else None
        gradients, gradients_finite, scaled_norm, sums, state_sums = reduce(
            forward.gradients, forward.sums + extra_scalars, forward.state
        )
        state = from_sums(state_sums, forward.structure.state)
        communication_sec = tf.constant(0.0, tf.float64)
        if begin is not None:
            communication_sec = moment_after([sums, *state_sums, *gradients]) - begin
        assert sums is not None  # a control vector was given
        looked_at = [sums[:end], *state_sums]  # a metric may be NaN, such as 0 of 0; nothing is trained by it
        is_finite = tf.reduce_all([gradients_finite, *(tf.reduce_all(tf.math.is_finite(each)) for each in looked_at)])
        scale = self.loss_scale.value
        if not self._follows_schedule:  # the first of a MultiOptimizer's, which has none itself
            learning_rate = getattr(self.optimizer, "optimizers", [self.optimizer])[0].learning_rate

        def update() -> tf.Tensor:
            if self._follows_schedule:
                self.optimizer.learning_rate = learning_rate
            unscaled = self.loss_scale.unscale(gradients, scale)
            if self.sharded is not None:
                self.sharded.apply(unscaled)
            else:
                self.optimizer.apply(unscaled, self.model.trainable_variables)
            self.averages.update(tf.convert_to_tensor(self.optimizer.iterations))
            for variable, value in zip(forward.structure.state, state.values, strict=True):
                variable.assign(value)
            return tf.constant(True)

        updated = tf.cond(is_finite & (state.divergent == 0), update, lambda: tf.constant(False))
        self.loss_scale.adapt(is_finite)
        norm = tf.cast(scaled_norm, self._dtype) / tf.cast(scale, self._dtype)
        facts = {
            "is_finite": updated,
            "gradient_norm": norm,
            "learning_rate": learning_rate,
            "loss_scale": scale,
            "divergent_state": state.divergent,
            "local_data_loss": forward.sums[1],
            "communication_sec": communication_sec,
        }
        return tf.concat([sums, tf.stack([tf.cast(facts[name], self._dtype) for name in STEP_FACTS])], axis=0)


def trace(function: Callable[..., tuple[Any, Found]], signature: Sequence[Any]) -> tuple[Any, Found]:
    """A function of a batch and tensors, traced, and other results of its trace, such as a structure."""
    found = []

    def compute(*arguments: Any) -> Any:
        returned, of_trace = function(*arguments)
        found.append(of_trace)
        return returned

    traced = tf.function(compute, input_signature=signature, autograph=False).get_concrete_function()
    return traced, found[-1]


def python_operations(graph: Any) -> list[str]:
    """The operations that call Python code of others, by name: of a graph, the functions in it, and those around it."""
    nodes = []
    while graph is not None and hasattr(graph, "outer_graph"):  # a function's
        definition = graph.as_graph_def()
        nodes += [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
        graph = graph.outer_graph
    return [node.name for node in nodes if node.op in PYTHON_OPERATIONS and MARK not in node.attr]


@functools.lru_cache(maxsize=8)
def constant(values: float | tuple[float, ...]) -> tf.Tensor:
    """These as float64: mostly those of the step before, and to make them again costs as much as some operations."""
    return tf.constant(values, tf.float64)


def moment_after(values: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
    """The time at which the last of these is ready, by the clock of the host: seconds, float64 []."""
    tensors = [value.values if isinstance(value, tf.IndexedSlices) else value for value in values]
    with tf.control_dependencies(tensors):
        return tf.timestamp()


def fix_batch_size(batch_spec: Batch, size: int) -> Batch:
    """The spec of batches that all have so many samples."""
    return tf.nest.map_structure(
        lambda spec: tf.TensorSpec([size, *spec.shape[1:]], spec.dtype) if spec.shape.rank else spec, batch_spec
    )


def set_precision(precision: Precision) -> None:
    """Make Keras create and compute in this type. Call before the model is created."""
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)
