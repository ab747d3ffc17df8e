"""One training step, compiled: forward, backward, reduction, verdict, update.

Each rank computes the gradient of the sum of its samples' losses over the planned number of samples of the *global*
batch; the sum of that over the ranks is the gradient of the mean over the global batch, exactly, however ragged the
ranks' shares are. Beside the gradients travels the control vector, a few sums that say how the step went; every
decision is taken from these reduced numbers, which are the same on every rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ringtrain.collectives.base import MARK, Collective
from ringtrain.collectives.gradients import GradientReduction
from ringtrain.config import Precision
from ringtrain.data.pipeline import Batch
from ringtrain.errors import UsageError
from ringtrain.guard.labels import find_labels
from ringtrain.run.variables import is_seed_state, name_variables, named_slots, named_weights
from ringtrain.step.averages import WeightAverages
from ringtrain.step.loss_scale import LossScale
from ringtrain.step.micro_batches import Forward, add_up
from ringtrain.step.report import CONTROL_SUMS, NUM_EXTRA_SCALARS, STEP_FACTS, StepReport, read_report
from ringtrain.workloads.base import Workload
from ringtrain.workloads.values import call_model, per_sample

PYTHON_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
Returned = tuple[tf.Tensor, list[tf.Tensor]]  # what a step says of itself, and what is to be kept until its end


class TrainStep:
    """Trains a model on one global batch at a time.

    Call it with this rank's ``Batch`` and the learning rate, then hand what it returns to ``read``.
    """

    def __init__(
        self,
        *,
        workload: Workload,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        reduction: GradientReduction,
        batch_spec: Batch,
        precision: Precision,
        accumulate: int,
        seed: int,
        ema: float = 0.0,
        local_batch_size: int | None = None,
        times_communication: bool = False,
    ) -> None:
        """Trace the step.

        Args:
            reduction: sums gradients over the ranks.
            batch_spec: tensor specs of a batch (``dataset.element_spec``).
            accumulate: micro-batches per step.
            seed: seed of dropout.
            ema: largest decay of the moving average of the weights; 0: none is kept.
            local_batch_size: samples of almost all of this rank's batches; None where that is not known.
            times_communication: take the moments for ``communication_seconds``. TensorFlow refuses that where it is to
                be deterministic; of what a GPU computes the host knows none, and to ask would let it wait.
        """
        self.model, self.optimizer = model, optimizer
        self.loss_scale = LossScale(is_dynamic=precision == "mixed_float16")
        self.averages = WeightAverages(model.trainable_variables, decay=ema)
        self.metric_names: tuple[str, ...] = ()
        self._workload = workload
        self._reduction = reduction
        self._collective: Collective = reduction.collective
        self._dtype = tf.float64 if precision == "float64" else tf.float32
        self._accumulate = accumulate
        self._times_communication = times_communication
        self._seed = seed
        self._seed_states = [v for v in model.non_trainable_variables if is_seed_state(v)]
        self._fixed_or_state = [v for v in model.non_trainable_variables if not is_seed_state(v)]
        self._state: list[keras.Variable] = []  # those that the forward pass updates; found when traced
        # A layer that asks the other ranks within its forward pass (SyncBatchNormalization) says so by this attribute.
        self._needs_every_rank = any(getattr(layer, "needs_every_rank", False) for layer in model._flatten_layers())
        self._follows_schedule = isinstance(optimizer.get_config().get("learning_rate"), float)
        optimizer.build(model.trainable_variables)
        extra_scalars = [tf.TensorSpec([], tf.float64), tf.TensorSpec([NUM_EXTRA_SCALARS], tf.float64)]
        signature = [batch_spec, *extra_scalars]
        self._local_batch_size = local_batch_size
        self._train_any = tf.function(self._train_samples, input_signature=signature, autograph=False)
        # A known number of samples saves the gradient of each addition the question whether anything was broadcast.
        usual = (
            signature if local_batch_size is None else [fix_batch_size(batch_spec, local_batch_size), *extra_scalars]
        )
        train = tf.function(self._train_samples, input_signature=usual, autograph=False)
        # Tracing finds the sparse gradients, the state and the metrics, which a rank without samples must know as well.
        # The traced function is called as it is: to choose among traces takes longer than a small step's computation.
        self._train = train.get_concrete_function()
        self.labels = find_labels(self._train, batch_spec)
        self._join = tf.function(self._train_nothing, input_signature=signature, autograph=False)
        self._look_again = tf.function(self._are_gradients_finite, input_signature=[batch_spec], autograph=False)

    def __call__(
        self, batch: Batch, learning_rate: float, *, is_stop_wanted: bool = False, next_count: int = 0
    ) -> tf.Tensor:
        """Train one step; every rank must call it for the same step.

        Args:
            is_stop_wanted: this rank's vote to end the training after this step.
            next_count: samples that this rank has for the next step, where that is not known before.

        Returns:
            The control vector and the step's facts, for ``read``; computed once the device gets there.
        """
        function = self._function_for(batch)
        returned, _ = function(batch, constant(learning_rate), constant((is_stop_wanted, next_count)))
        return returned

    def is_traced_for(self, batch: Batch) -> bool:
        """Whether a step with this rank's batch begins at once; else TensorFlow traces a function for it before."""
        function = self._function_for(batch)
        return function is self._train or function.experimental_get_tracing_count() > 0

    def _function_for(self, batch: Batch) -> Any:
        """What computes the step: it depends on how many samples there are."""
        num_samples = batch.indices.shape[0]
        if num_samples == self._local_batch_size or (num_samples and self._local_batch_size is None):
            return self._train
        return self._train_any if num_samples or self._needs_every_rank else self._join

    @property
    def python_operations(self) -> list[str]:
        """The operations of a usual step that call the workload's own Python code (``tf.py_function``), by name."""
        definition = self._train.graph.as_graph_def()
        nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
        return [node.name for node in nodes if node.op in PYTHON_OPERATIONS and MARK not in node.attr]

    @property
    def variables(self) -> list[keras.Variable]:
        """What rank 0's values must reach and a checkpoint holds: all but dropout's seeds, which follow the step."""
        return list(self.named_variables.values())

    @property
    def named_variables(self) -> dict[str, keras.Variable]:
        """Weights, slots, averages and the loss scale, such as ``weights/digits/conv2d/kernel``."""
        return name_variables(
            weights=named_weights(self.model),
            slots=named_slots(self.optimizer),
            averages=[(weight.path, average) for weight, average in self.averages.pairs],
            loss_scale=[(v.path, v) for v in self.loss_scale.variables],
        )

    def find_nonfinite_gradients(self, batch: Batch) -> list[str]:
        """The weights whose gradient by this rank's samples alone is not finite, in the order of the model.

        It computes the gradients of the batch once more, and changes nothing. Every rank must call it.
        """
        if not (batch.indices.shape[0] or self._needs_every_rank):
            return []
        are_finite = self._look_again(batch).numpy()
        return [
            v.path for v, is_finite in zip(self.model.trainable_variables, are_finite, strict=True) if not is_finite
        ]

    def read(self, returned: tf.Tensor) -> StepReport:
        """Bring to the host what a call returned."""
        return read_report(returned, self.metric_names)

    def _train_samples(self, batch: Batch, learning_rate: tf.Tensor, extra_scalars: tf.Tensor) -> Returned:
        local_count = tf.shape(batch.indices, tf.int64)[0]
        forward = self._all_forward_and_backward(batch, local_count)
        local_share = tf.cast(local_count, self._dtype) / tf.cast(batch.global_count, self._dtype)
        state = [tf.cast(value, _averaging_dtype(value)) * tf.cast(local_share, _averaging_dtype(value))
                 for value in forward.state]  # fmt: skip
        return self._reduce_and_update(forward._replace(state=state), learning_rate, extra_scalars)

    def _train_nothing(self, batch: Batch, learning_rate: tf.Tensor, extra_scalars: tf.Tensor) -> Returned:
        """The step of a rank whose share is empty: it adds zeros, without running the model.

        Horovod's operations are not marked as stateful: TensorFlow's optimizer would run one whose input is constant
        once, keep what came of it for all later steps, and merge two with the same input, while the other ranks wait.
        So the zeros come from the batch, and each by a factor of its own.
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
            for v, index_dtype in zip(self.model.trainable_variables, self._sparse_index_dtypes, strict=True)
        ]
        state = [zeros(v.shape, _averaging_dtype(v)) for v in self._state]
        sums = zeros([len(CONTROL_SUMS) + len(self.metric_names)], self._dtype)
        return self._reduce_and_update(Forward(gradients, sums, state), learning_rate, extra_scalars)

    def _are_gradients_finite(self, batch: Batch) -> tf.Tensor:
        """For each trainable variable, bool [variables]."""
        gradients = self._all_forward_and_backward(batch, tf.shape(batch.indices, tf.int64)[0]).gradients
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        return tf.stack([tf.reduce_all(tf.math.is_finite(value)) for value in values])

    def _all_forward_and_backward(self, batch: Batch, local_count: tf.Tensor) -> Forward:
        """Gradients and sums of all samples of this rank's batch."""
        before = [tf.convert_to_tensor(v.value) for v in self._fixed_or_state]
        if self._accumulate == 1:
            return self._forward_and_backward(batch, 0, local_count, before, tf.constant(0))

        def compute(start: Any, end: Any, updated: Sequence[tf.Tensor], number: tf.Tensor) -> Forward:
            newest = {id(v): value for v, value in zip(self._state, updated, strict=bool(updated))}
            state = [newest.get(id(v), value) for v, value in zip(self._fixed_or_state, before, strict=True)]
            return self._forward_and_backward(batch, start, end, state, number)

        return add_up(
            compute,
            num_samples=local_count,
            num_micro_batches=self._accumulate,
            variables=self.model.trainable_variables,
            needs_all=self._needs_every_rank,
        )

    def _forward_and_backward(
        self, batch: Batch, start: Any, end: Any, state: Sequence[tf.Tensor], micro_batch: tf.Tensor
    ) -> Forward:
        """Gradients and sums of the samples ``start`` to ``end`` of this rank's batch."""
        x, y = batch.x, batch.y
        if self._accumulate > 1:
            x, y = tf.nest.map_structure(lambda tensor: tensor[start:end], (x, y))
        count = tf.cast(end - start, self._dtype)
        global_count = tf.cast(batch.global_count, self._dtype)
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            values = [
                *((v, v) for v in variables),
                *zip(self._fixed_or_state, state, strict=True),
                *zip(self._seed_states, self._dropout_seeds(batch.step, micro_batch), strict=True),
            ]
            # Updates that the forward pass makes (BatchNorm's statistics) stay inside the scope, so that a step that
            # turns out not to be finite leaves no trace.
            with keras.StatelessScope(values, collect_losses=True, initialize_variables=False) as scope:
                outputs = call_model(self._workload, self.model, x, training=True)
                losses, metrics = per_sample(self._workload, y, outputs)
                regularization = tf.add_n([tf.zeros([], self._dtype), *cast_all(self.model.losses, self._dtype)])
            data_loss_sum = tf.reduce_sum(tf.cast(losses, self._dtype))
            scaled_objective = self.loss_scale.scale(
                partial_objective(data_loss_sum, regularization, count=count, global_count=global_count)
            )
        found = tape.gradient(scaled_objective, [v.value for v in variables])
        require_a_gradient(self._workload, found)
        gradients = [
            zeros_of_no_constant(v, batch.step, number) if gradient is None else with_shape_of(v, gradient)
            for number, (v, gradient) in enumerate(zip(variables, found, strict=True), start=1)
        ]
        self._learn_structure(scope, state, gradients, metrics)
        metric_sums = [tf.reduce_sum(tf.cast(metrics[name], self._dtype)) for name in self.metric_names]
        nothing_told = [
            tf.zeros([], self._dtype)
        ] * NUM_EXTRA_SCALARS  # added before the reduction, once for all micro-batches
        sums = tf.stack([count, data_loss_sum, regularization * count, *nothing_told, *metric_sums])
        return Forward(gradients, sums, [scope.get_current_value(v) for v in self._state])

    def _learn_structure(
        self, scope: keras.StatelessScope, state: Sequence[tf.Tensor], gradients: Sequence[Any], metrics: dict[str, Any]
    ) -> None:
        """Note, while tracing, what the step consists of."""
        self.metric_names = tuple(sorted(metrics))
        self._sparse_index_dtypes = [g.indices.dtype if isinstance(g, tf.IndexedSlices) else None for g in gradients]
        self._state = [
            variable
            for variable, before in zip(self._fixed_or_state, state, strict=True)
            if scope.get_current_value(variable) is not before
        ]

    def _reduce_and_update(self, forward: Forward, learning_rate: tf.Tensor, extra_scalars: tf.Tensor) -> Returned:
        end = len(CONTROL_SUMS)
        extra_scalars = tf.pad(
            tf.cast(extra_scalars, self._dtype), [[end - NUM_EXTRA_SCALARS, forward.sums.shape[0] - end]]
        )
        # TensorFlow runs what is stateful in the order in which it is written here: a clock, a sum in shared memory.
        begin = moment_after([*forward.state, *forward.gradients]) if self._times_communication else None
        state = self._sum_state(forward.state)
        gradients, gradients_finite, scaled_norm, sums, keep_alive = self._reduction(
            forward.gradients, forward.sums + extra_scalars
        )
        communication_sec = tf.constant(0.0, tf.float64)
        if begin is not None:
            communication_sec = moment_after([sums, *state, *gradients]) - begin
        assert sums is not None  # a control vector was given
        looked_at = [sums[:end], *state]  # a metric may be NaN, such as 0 of 0; nothing is trained by it
        is_finite = tf.reduce_all([gradients_finite, *(tf.reduce_all(tf.math.is_finite(each)) for each in looked_at)])
        scale = self.loss_scale.value
        if not self._follows_schedule:  # the first of a MultiOptimizer's, which has none itself
            learning_rate = getattr(self.optimizer, "optimizers", [self.optimizer])[0].learning_rate

        def update() -> tf.Tensor:
            if self._follows_schedule:
                self.optimizer.learning_rate = learning_rate
            self.optimizer.apply(self.loss_scale.unscale(gradients, scale), self.model.trainable_variables)
            self.averages.update(tf.convert_to_tensor(self.optimizer.iterations))
            for variable, value in zip(self._state, state, strict=True):
                variable.assign(tf.cast(value, variable.dtype))
            return tf.constant(True)

        updated = tf.cond(is_finite, update, lambda: tf.constant(False))
        self.loss_scale.adapt(is_finite)
        norm = tf.cast(scaled_norm, self._dtype) / tf.cast(scale, self._dtype)
        facts = {
            "is_finite": updated,
            "gradient_norm": norm,
            "learning_rate": learning_rate,
            "loss_scale": scale,
            "local_data_loss": forward.sums[1],
            "communication_sec": communication_sec,
        }
        returned = tf.concat([sums, tf.stack(cast_all([facts[name] for name in STEP_FACTS], self._dtype))], axis=0)
        return returned, list(keep_alive)  # what a function returns is kept until all of it is computed

    def _sum_state(self, state: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The mean over all samples of what the ranks' forward passes made of the state (BatchNorm's statistics)."""
        by_dtype: dict[tf.DType, list[int]] = {}
        for position, value in enumerate(state):
            by_dtype.setdefault(value.dtype, []).append(position)
        sums = list(state)
        for dtype, positions in by_dtype.items():
            totals = self._collective.all_reduce([state[i] for i in positions], name=f"state/{dtype.name}").tensors
            for position, total in zip(positions, totals, strict=True):
                sums[position] = total
        return sums

    def _dropout_seeds(self, step: tf.Tensor, micro_batch: tf.Tensor) -> list[tf.Tensor]:
        """A state for each of the model's seed generators, from (seed, generator, rank, step, micro-batch)."""
        seeds = []
        for number, variable in enumerate(self._seed_states):
            key = tf.constant([self._seed % 2**31, number], tf.int32)
            for part in (self._collective.world.rank, step, micro_batch):
                key = tf.random.experimental.stateless_fold_in(key, tf.cast(part, tf.int32))
            seeds.append(tf.cast(tf.bitwise.bitwise_and(key, 2**31 - 1), variable.dtype))
        return seeds


def partial_objective(
    data_loss_sum: tf.Tensor, regularization: tf.Tensor, *, count: tf.Tensor, global_count: tf.Tensor
) -> tf.Tensor:
    """A rank's part of the objective, whose sum over all ranks is (mean loss of the global batch) + regularisation.

    Args:
        data_loss_sum: sum of the losses of this rank's samples.
        regularization: the regularisation losses, the same on every rank.
        count: samples of this rank.
        global_count: samples of all ranks.
    """
    return data_loss_sum / global_count + regularization * (count / global_count)


def require_a_gradient(workload: Workload, gradients: Sequence[Any]) -> None:
    """See that the loss depends on some weight.

    Raises:
        UsageError: it depends on none.
    """
    if all(gradient is None for gradient in gradients):
        raise UsageError(
            f"{type(workload).__name__}.loss gives a loss on which no weight of the model has any influence: nothing "
            "would be trained. Compute it from the outputs, without what has no gradient, such as tf.argmax, tf.round "
            "or .numpy().",
            reach="run",
        )


def with_shape_of(variable: keras.Variable, gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """The gradient of a variable, with its shape known while the step is traced.

    Which gradients travel together follows from their sizes, and all ranks must see the same: also one that has no
    samples, and knows its variables alone.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        gradient.set_shape(variable.shape)  # unknown behind a gradient of the user's own, for example
    return gradient


def zeros_of_no_constant(variable: keras.Variable, step: tf.Tensor, number: int) -> tf.Tensor:
    """The gradient of a variable that the loss does not use.

    TensorFlow's optimizer runs a reduction of constants while it compiles (see ``_train_nothing``), which one rank may
    do in another step than the others. No step is below 0, and TensorFlow does not know it.
    """
    nothing = tf.minimum(step, 0) * number
    return tf.zeros(variable.shape, variable.dtype) + tf.cast(nothing, variable.dtype)


@functools.lru_cache(maxsize=8)
def constant(values: float | tuple[float, ...]) -> tf.Tensor:
    """These as float64: mostly those of the step before, and to make them anew costs as much as some operations."""
    return tf.constant(values, tf.float64)


def moment_after(values: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
    """When the last of these is there, by the clock of the host: seconds, float64 []."""
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


def cast_all(tensors: Sequence[tf.Tensor], dtype: tf.DType) -> list[tf.Tensor]:
    """Tensors in one type."""
    return [tf.cast(tensor, dtype) for tensor in tensors]


def _averaging_dtype(value: tf.Tensor | keras.Variable) -> tf.DType:
    return tf.float64 if tf.as_dtype(value.dtype) == tf.float64 else tf.float32
