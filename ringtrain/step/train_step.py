"""The compiled training step: forward, backward, reduction, finite check, update.

The sum over ranks of gradients of (sum of local losses) / (*global* number of samples) is exactly the gradient of the
global mean, even for unequal local batches. All decisions use numbers that are reduced with the gradients.
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
from ringtrain.data.pipeline import Batch, with_batch_size
from ringtrain.errors import UsageError
from ringtrain.guard.labels import find_labels
from ringtrain.messages.rules import list_first
from ringtrain.run.variables import broadcast_variables, name_variables, named_slots, named_weights
from ringtrain.step.compiled import MAX_NAMED, nodes_of
from ringtrain.step.local_gradients import CompiledGradients, Forward, LocalGradients, StepStructure
from ringtrain.step.loss_scale import LossScale
from ringtrain.step.optimizers import WeightAverages
from ringtrain.step.report import EXTRA_SCALARS, NUM_SUMS, StepReport, add_extra_scalars, pack, unpack
from ringtrain.step.sharding import ShardedOptimizer
from ringtrain.step.state import from_sums, to_summands
from ringtrain.workloads.base import Workload
from ringtrain.workloads.stateful_metrics import NO_METRICS, StatefulMetrics

Found = TypeVar("Found")
PYTHON_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
ROW_STATE = "row_state"  # kind of a variable's name
SCALARS = (tf.TensorSpec([], tf.float64), EXTRA_SCALARS)


class TrainStep:
    """Trains a model on one global batch per call; ``read`` reads the result."""

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
        stateful_metrics: StatefulMetrics = NO_METRICS,
    ) -> None:
        """Trace the step; this rank's batches mostly have ``local_batch_size`` samples.

        ``times_communication``: False in deterministic mode (TensorFlow refuses clocks) and on a GPU (the host would
        wait). ``jit_compile``: see ``decide_on_xla``.

        Raises:
            UsageError: XLA cannot compile an operation of the model or the loss.
        """
        self.model, self.optimizer = model, optimizer
        self.stateful_metrics = stateful_metrics
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
        # A static size spares gradients the check for broadcasts.
        self.usual_spec, size = batch_spec, local_batch_size
        if size is not None:
            self.usual_spec = with_batch_size(batch_spec, size)
        self._trace_usual(workload, config, self.usual_spec, reduction.collective.world.rank, jit_compile=jit_compile)
        self.compiled = self.local_gradients.compiled
        if self.compiled is not None:
            self._require_supported_operations(self.compiled, config)
        self.labels = self.compiled.labels if self.compiled else find_labels(self.train, batch_spec)
        of_any, train = [batch_spec, *SCALARS], lambda *given: self._train_samples(*given)[0]
        self._train_any = tf.function(train, input_signature=of_any, autograph=False)
        self._join = tf.function(self._train_empty_batch, input_signature=of_any, autograph=False)
        self._look_again = tf.function(self._are_gradients_finite, input_signature=[batch_spec], autograph=False)

    def _trace_usual(self, workload: Workload, config: Config, spec: Batch, rank: int, *, jit_compile: bool) -> None:
        self.local_gradients = LocalGradients(
            workload,
            config,
            self.model,
            self.loss_scale,
            dtype=self._dtype,
            rank=rank,
            jit_compile=jit_compile,
            local_batch_size=self._local_batch_size,
            stateful_metrics=self.stateful_metrics,
        )
        # Of (batch, rate, extra scalars). Concrete: the choice among traces takes longer than a small step.
        self.train, structure = trace(self._train_samples, [spec, *SCALARS])
        self._structure = structure
        self.state = structure.state
        self.row_state = structure.row_state
        self.metric_names = structure.metric_names
        assigned_weights = find_assigned_weights(structure, self.model)
        if self.sharded is not None and assigned_weights:
            path = assigned_weights[0].path
            raise UsageError(
                f"shard_optimizer is true, but the forward pass changes the weight {path}, of which each rank updates "
                "only a piece. Leave --shard_optimizer out."
            )

    def _require_supported_operations(self, compiled: CompiledGradients, config: Config) -> None:
        """Refuse operations that XLA lacks before the first step, in which ranks wait for each other."""
        if compiled.function.has_unknown_lengths:
            unsupported = list_first(self.python_operations(), MAX_NAMED)
        else:
            unsupported = compiled.function.find_unsupported()
        if unsupported:
            mode = " with --deterministic true" if config.deterministic else ""
            raise UsageError(
                f"--jit_compile {config.jit_compile}: XLA cannot compile {unsupported}{mode}. "
                "Train without XLA: --jit_compile false. Or use other operations in the model and "
                "the loss; sources and augment() may use any."
            )

    def __call__(
        self, batch: Batch, learning_rate: float, *, is_stop_wanted: bool = False, next_count: int = 0
    ) -> tf.Tensor:
        """Train one step. Collective.

        ``is_stop_wanted``: vote to stop after it. ``next_count``: this rank's next samples, if not planned. Returns
        control vector and facts for ``read``, asynchronously.
        """
        function = self._function_for(batch)
        return function(batch, constant(learning_rate), constant((is_stop_wanted, next_count)))

    @property
    def has_sparse_gradients(self) -> bool:
        return any(self._structure.sparse_index_dtypes)

    def is_traced_for(self, batch: Batch) -> bool:
        function = self._function_for(batch)
        return function is self.train or function.experimental_get_tracing_count() > 0

    def _function_for(self, batch: Batch) -> Any:
        num_samples = batch.indices.shape[0]
        if self.row_state and num_samples:
            require_full_batch(num_samples, self.row_state)
        if num_samples == self._local_batch_size or (num_samples and self._local_batch_size is None):
            return self.train
        return self._train_any if num_samples or self.local_gradients.needs_every_rank else self._join

    def python_operations(self) -> list[str]:
        return python_operations(self.train.graph)

    @property
    def variables(self) -> list[keras.Variable]:
        """Variables to broadcast: not dropout's seeds, which depend on the step, nor sharded slots."""
        return list(self.named_variables.values())

    @property
    def named_variables(self) -> dict[str, keras.Variable]:
        """Equal on all ranks; names such as ``weights/digits``."""
        sharded = self.sharded
        return {name: v for name, v in self._name_all().items() if sharded is None or not sharded.is_shared_out(v)}

    @property
    def named_pieces(self) -> dict[str, keras.Variable]:
        """Sharded slots only."""
        return {name: v for name, v in self._name_all().items() if self.sharded and self.sharded.is_shared_out(v)}

    @property
    def shapes_of_shared_out(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Whole sharded slots."""
        return {name: (self.sharded.shape_of(v), str(v.dtype)) for name, v in self.named_pieces.items() if self.sharded}

    @property
    def names(self) -> list[str]:
        return list(self._name_all())

    def gather_shared_out(self) -> dict[str, np.ndarray]:
        """Whole sharded slots, on rank 0 only. Collective."""
        return self.sharded.gather(self.named_pieces) if self.sharded is not None else {}

    @property
    def named_row_state(self) -> dict[str, keras.Variable]:
        """State of this rank's rows, such as that of stateful recurrent layers."""
        return name_variables(**{ROW_STATE: [(variable.path, variable) for variable in self.row_state]})

    def share_values(self, collective: Collective, slots: Mapping[str, np.ndarray] | None = None) -> None:
        """Broadcast rank 0's values. Collective.

        ``slots``: rank 0's whole sharded slots, None for a new run; other ranks pass any mapping if it resumes.
        """
        broadcast_variables(self.variables, collective)
        if self.sharded is not None:
            self.sharded.begin_from_weights()
            if slots is not None:
                self.sharded.scatter(self.named_pieces, slots)

    def _name_all(self) -> dict[str, keras.Variable]:
        weights = named_weights(self.model)
        weight_ids = {id(variable) for _, variable in weights}
        row_state_ids = {id(variable) for variable in self.row_state}
        weights = [(path, variable) for path, variable in weights if id(variable) not in row_state_ids]
        unlisted_state = [(v.path, v) for v in self.state if id(v) not in weight_ids]
        return name_variables(
            weights=weights,
            state=unlisted_state,
            slots=named_slots(self.optimizer),
            averages=[(weight.path, average) for weight, average in self.averages.pairs],
            loss_scale=[(v.path, v) for v in self.loss_scale.variables],
        )

    def find_nonfinite_gradients(self, batch: Batch) -> list[str]:
        """Compute this rank's gradients again; return paths of weights with non-finite ones. Collective."""
        if not (batch.indices.shape[0] or self.local_gradients.needs_every_rank):
            return []
        are_finite = self._look_again(batch).numpy()
        return [
            v.path for v, is_finite in zip(self.model.trainable_variables, are_finite, strict=True) if not is_finite
        ]

    def read(self, returned: Any) -> StepReport:
        """``returned``: by a call, or one column for each step."""
        return unpack(np.asarray(returned), self.metric_names)

    def _train_samples(
        self, batch: Batch, learning_rate: tf.Tensor, extra_scalars: tf.Tensor
    ) -> tuple[tf.Tensor, StepStructure]:
        forward = self._compute_forward(batch)
        return self._reduce_and_update(forward, learning_rate, extra_scalars), forward.structure

    def _compute_forward(self, batch: Batch) -> Forward:
        local_count = tf.shape(batch.indices, tf.int64)[0]
        forward = self.local_gradients(batch, local_count)
        summands = to_summands(forward.state, local_count=local_count, global_count=batch.global_count)
        return forward._replace(state=summands)

    def _train_empty_batch(self, batch: Batch, learning_rate: tf.Tensor, extra_scalars: tf.Tensor) -> tf.Tensor:
        forward = self.local_gradients.zero_gradients(batch, self._structure)
        return self._reduce_and_update(forward, learning_rate, extra_scalars)

    def _are_gradients_finite(self, batch: Batch) -> tf.Tensor:
        gradients = self.local_gradients(batch, tf.shape(batch.indices, tf.int64)[0]).gradients
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        return tf.stack([tf.reduce_all(tf.math.is_finite(value)) for value in values])

    def _reduce_and_update(self, forward: Forward, learning_rate: tf.Tensor, extra_scalars: tf.Tensor) -> tf.Tensor:
        reduce = self._reduction if self.sharded is None else self.sharded.reduce
        # TensorFlow runs stateful operations (clock, native sums) in this order.
        begin = moment_after([*forward.state, *forward.gradients]) if self.times_communication else None
        gradients, gradients_finite, scaled_norm, sums, state_sums = reduce(
            forward.gradients, add_extra_scalars(forward.sums, extra_scalars), forward.state
        )
        values, divergent = from_sums(state_sums, forward.structure.state)
        communication_sec = tf.constant(0.0, tf.float64)
        if begin is not None:
            communication_sec = moment_after([sums, *state_sums, *gradients]) - begin
        assert sums is not None
        is_finite = gradients_finite
        for each in [sums[:NUM_SUMS], *state_sums]:  # a metric may be NaN, such as 0 / 0
            is_finite &= tf.reduce_all(tf.math.is_finite(each))
        scale = self.loss_scale.value
        if not self._follows_schedule:  # MultiOptimizer has no rate itself
            learning_rate = getattr(self.optimizer, "optimizers", [self.optimizer])[0].learning_rate

        weight_ids = {id(weight) for weight in find_assigned_weights(forward.structure, self.model)}

        def update() -> tf.Tensor:
            for variable, value in zip(forward.structure.state, values, strict=True):
                if id(variable) in weight_ids:  # the gradient is that of the changed weight
                    variable.assign(value)
            if self._follows_schedule:
                self.optimizer.learning_rate = learning_rate
            unscaled = self.loss_scale.unscale(gradients, scale)
            if self.sharded is not None:
                self.sharded.apply(unscaled)
            else:
                self.optimizer.apply(unscaled, self.model.trainable_variables)
            self.averages.update(tf.convert_to_tensor(self.optimizer.iterations))
            for variable, value in zip(forward.structure.state, values, strict=True):
                if id(variable) not in weight_ids:
                    variable.assign(value)
            if forward.row_state:
                for variable, value in zip(forward.structure.row_state, forward.row_state, strict=True):
                    variable.assign(value)
            if forward.metric_state:
                for variable, value in zip(forward.structure.metric_state, forward.metric_state, strict=True):
                    variable.assign(value)
            return tf.constant(True)

        updated = tf.cond(is_finite & (divergent == 0), update, lambda: tf.constant(False))
        self.loss_scale.adapt(is_finite)
        norm = tf.cast(scaled_norm, self._dtype) / tf.cast(scale, self._dtype)
        return pack(
            sums,
            local_sums=forward.sums,
            is_finite=updated,
            gradient_norm=norm,
            learning_rate=learning_rate,
            loss_scale=scale,
            divergent_state=divergent,
            communication_sec=communication_sec,
        )


def find_assigned_weights(structure: StepStructure, model: keras.Model) -> list[keras.Variable]:
    """Return trained weights that the forward pass changes, as spectral normalization does."""
    trained_ids = {id(weight) for weight in model.trainable_variables}
    return [variable for variable in structure.state if id(variable) in trained_ids]


def require_full_batch(num_samples: int, row_state: Sequence[keras.Variable]) -> None:
    """Raise UsageError, by the layer's name, for a batch without a sample for each row."""
    for variable in row_state:
        num_rows = variable.shape[0]
        if num_samples != num_rows:
            raise UsageError(
                f"a batch has {num_samples} samples, but {variable.path} holds the state of {num_rows} rows, one for "
                f"each sample of a batch: the last batch of the data is smaller, for example. Give batches of "
                f"{num_rows} samples on each rank only, or use the layer with stateful=False."
            )


def trace(function: Callable[..., tuple[Any, Found]], signature: Sequence[Any]) -> tuple[Any, Found]:
    found = []

    def compute(*arguments: Any) -> Any:
        returned, of_trace = function(*arguments)
        found.append(of_trace)
        return returned

    traced = tf.function(compute, input_signature=signature, autograph=False).get_concrete_function()
    return traced, found[-1]


def python_operations(graph: Any) -> list[str]:
    """Exclude ringtrain's own."""
    nodes = []
    while graph is not None and hasattr(graph, "outer_graph"):
        nodes += nodes_of(graph)
        graph = graph.outer_graph
    return [node.name for node in nodes if node.op in PYTHON_OPERATIONS and MARK not in node.attr]


@functools.lru_cache(maxsize=8)
def constant(values: float | tuple[float, ...]) -> tf.Tensor:
    """Cached: most calls repeat the last values."""
    return tf.constant(values, tf.float64)


def moment_after(values: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
    """Host's time in seconds when the last value is ready: float64 []."""
    tensors = [value.values if isinstance(value, tf.IndexedSlices) else value for value in values]
    with tf.control_dependencies(tensors):
        return tf.timestamp()


def set_precision(precision: Precision) -> None:
    """Set Keras' types. Call it before the model is created."""
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)
