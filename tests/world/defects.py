"""Defects for `ringtrain verify` to find: which there are, what shows each, and how it is planted in a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock


@dataclass(frozen=True, kw_only=True)
class Planted:
    """How a defect is found.

    Attributes:
        trial: the trial of `verify` that shows it; `plain`: only a plain Keras loop does.
        workload: of tests/world/workloads/small.py.
        settings: the options of the run.
        is_shared: True if all world sizes have it.
        is_native: True if it is planted in native sums.
        is_quick: True for those that every run of the tests plants.
    """

    trial: str = "float64"
    workload: str = "Small"
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_shared: bool = False
    is_native: bool = False
    is_quick: bool = False


SHARED = Planted(is_shared=True)
CLIPPED = {"optimizer": {"name": "sgd", "lr": 0.1, "clip_global_norm": 0.01}}
AVERAGED = {"optimizer": {"name": "sgd", "lr": 0.1, "ema": 0.9}}
PLANTED = {
    "a reduction that returns its input": Planted(is_native=True, is_quick=True),
    "a mean of means": Planted(),  # test_losses_across_samples_are_named_as_the_cause plants it in every run
    "a weight that is not broadcast": Planted(is_quick=True),
    "a duplicated sample": Planted(),
    "augmentation seeded by rank": Planted(),
    "a slot that is not broadcast": Planted(),
    "regularisation added on every rank": Planted(),
    "a bias' gradient doubled on rank 1": Planted(),
    "a factor of the loss that depends on the rank": Planted(),
    "gradients averaged once more": Planted(),
    "a control vector that is not summed": Planted(),
    "clipping before the sum": Planted(settings=CLIPPED),
    "a learning rate that grows with the ranks": Planted(),
    "averages that one rank updates": Planted(settings=AVERAGED),
    "evaluation of each rank's samples": Planted(),
    "the last sample of a rank left out": Planted(),
    "an order that differs by rank": Planted(),
    "statistics of each rank's samples": Planted(workload="Normalized"),
    "sparse rows of each rank alone": Planted(workload="Embedded"),
    "the last group is not summed": Planted(trial="float32", is_quick=True),
    "a finite check that one rank ignores": Planted(trial="own", settings={"precision": "mixed_float16"}),
    "pieces that are not summed": Planted(trial="float64-sharded", is_quick=True),
    "a norm to clip by of own pieces": Planted(trial="float64-sharded", settings=CLIPPED),
    "micro-batches after the first left out": Planted(trial="float64-accumulated", is_quick=True),
    "micro-batches that count alike": Planted(trial="float64-accumulated"),
    "a vector whose gradients are not summed": Planted(trial="float64-accumulated"),
    "a loss scale that one rank adapts": Planted(trial="own", settings={"precision": "mixed_float16"}, is_quick=True),
    "compressed gradients of half the size": Planted(trial="own", settings={"compression": "fp16"}),
    "the same order in every epoch": SHARED,
    "an epoch's rest in its last batch": SHARED,
    "the last evaluation batch counted twice": SHARED,
    "evaluation's regularisation doubled": Planted(trial="plain"),
    "batch normalization's state kept as it was": Planted(trial="plain"),
}


@contextlib.contextmanager
def planted(defect: str | None, rank: int) -> Iterator[None]:
    """Plant a defect in this rank's ringtrain."""
    import tensorflow as tf

    from ringtrain.collectives import Totals, normalization
    from ringtrain.collectives import gradients as gradients_module
    from ringtrain.collectives.gradients import GradientReduction
    from ringtrain.collectives.native.backend import Native
    from ringtrain.collectives.shards import ShardedReduction, cut
    from ringtrain.data import augment, order, pipeline
    from ringtrain.data.order import SampleOrder
    from ringtrain.run import variables
    from ringtrain.step import local_gradients
    from ringtrain.step import train_step as step
    from ringtrain.step.loss_scale import LossScale
    from ringtrain.step.optimizers import WeightAverages
    from ringtrain.step.sharding import ShardedOptimizer
    from ringtrain.training import evaluation, job
    from ringtrain.workloads import values

    right_plan, right_sharing = SampleOrder._plan, variables.broadcast_variables
    right_update = step.TrainStep._reduce_and_update
    right_sum, right_all_reduce, right_reduction = Native.sum_in_order, Native.all_reduce, GradientReduction.__call__
    right_permute, right_penalty = order.permute, evaluation.EvalStep.regularization
    right_average, right_losses = WeightAverages.update, values.per_sample
    right_evaluate, right_seeds = evaluation.evaluate, local_gradients.LocalGradients._dropout_seeds

    def mean_of_means(self: Any, *steps: int, rank: int, size: int) -> Any:
        planned = right_plan(self, *steps, rank=rank, size=size)
        return [batch._replace(global_count=size * len(batch.indices)) for batch in planned]

    def duplicated_sample(self: Any, *steps: int, rank: int, size: int) -> Any:
        planned = right_plan(self, *steps, rank=rank, size=size)
        for batch in planned if rank == 1 else ():
            batch.indices[-1] = batch.indices[0]
        return planned

    def without(kind: str) -> Any:
        return lambda variables, collective: right_sharing([v for v in variables if kind not in v.path], collective)

    def objective_of_each_rank(data_loss_sum: Any, regularization: Any, *, count: Any, global_count: Any) -> Any:
        del count
        return data_loss_sum / global_count + regularization

    def keys_of_each_rank(seed: int, epoch: Any, indices: Any) -> Any:
        return augment.sample_keys(seed + rank, epoch, indices)

    def loss_by_rank(workload: Any, y: Any, outputs: Any) -> Any:
        losses, metrics = right_losses(workload, y, outputs)
        return losses * (1 + rank), metrics

    def its_input(self: Any, tensors: Any, **how: Any) -> Totals:
        if not how["name"].startswith("gradients"):
            return right_sum(self, tensors, **how)
        return Totals(list(tensors), tf.stack([tf.reduce_sum(tf.square(tf.cast(t, tf.float64))) for t in tensors]))

    def its_group(self: Any, tensors: Any, *, name: str) -> Any:
        return list(tensors) if name.startswith("gradients") else right_all_reduce(self, tensors, name=name)

    def doubled_on_rank_1(self: Any, gradients: Any, *others_to_sum: Any) -> Any:
        first, bias, *others = gradients
        return right_reduction(self, [first, 2 * bias if rank == 1 else bias, *others], *others_to_sum)

    def with_old_state(self: Any, forward: Any, *arguments: Any) -> Any:
        old = [tf.convert_to_tensor(variable.value) for variable in forward.structure.state]
        return right_update(self, forward._replace(state=old), *arguments)

    def as_in_first_epoch(positions: Any, domain_size: int, key: Any) -> Any:
        return right_permute(positions, domain_size, (key[0], 0))

    def with_last_twice(eval_step: Any, batches: Any, *others: Any, **options: Any) -> Any:
        *rest, last = batches
        repeated: Any = [*rest, last, last]
        return right_evaluate(eval_step, repeated, *others, **options)

    def mean_of_micro_batches(data_loss_sum: Any, regularization: Any, *, count: Any, global_count: Any) -> Any:
        return (data_loss_sum / count + regularization) / 3

    def by_ranks(self: Any, batch: Any) -> Any:
        forward = self.local_gradients(batch, tf.shape(batch.indices, tf.int64)[0])
        return forward._replace(state=[value / self._reduction.collective.world.size for value in forward.state])

    right_groups, right_adapt = GradientReduction.plan_groups, LossScale.adapt
    right_call, right_order = step.TrainStep.__call__, order.permute

    def without_last_group(self: Any, specs: Any) -> Any:
        return right_groups(self, specs)[:-1]

    def own_pieces(self: Any, group: Any, gradients: Any, name: str) -> Any:
        del name
        return [cut(gradient, self.own[i]) for i, gradient in zip(group, gradients, strict=True)]

    def always_finite(self: Any, *arguments: Any) -> Any:
        reduced = right_reduction(self, *arguments)
        return reduced._replace(is_finite=reduced.is_finite | (rank == 0))

    def averaged(self: Any, gradients: Any, *others: Any) -> Any:
        reduced = right_reduction(self, gradients, *others)
        size = self.collective.world.size
        return reduced._replace(gradients=[gradient / size for gradient in reduced.gradients])

    def own_control(self: Any, gradients: Any, control: Any = None, state: Any = ()) -> Any:
        return right_reduction(self, gradients, control, state)._replace(control=control)

    def clipped_before(self: Any, gradients: Any, *others: Any) -> Any:
        return right_reduction(self, tf.clip_by_global_norm(gradients, 0.01)[0], *others)

    def faster_by_ranks(self: Any, batch: Any, learning_rate: float, **more: Any) -> Any:
        return right_call(self, batch, learning_rate * self._reduction.collective.world.size, **more)

    def without_last_of_rank_1(self: Any, *steps: int, rank: int, size: int) -> Any:
        planned = right_plan(self, *steps, rank=rank, size=size)
        return [
            batch._replace(indices=batch.indices[:-1]) if rank == 1 and self.shuffle else batch for batch in planned
        ]

    def order_of_each_rank(positions: Any, domain_size: int, key: Any) -> Any:
        return right_order(positions, domain_size, (key[0] + rank, *key[1:]))

    def own_vector(self: Any, gradients: Any, control: Any, name: str) -> Any:
        reduced = right_vector(self, gradients, control, name)
        return reduced._replace(gradients=list(gradients))

    def own_losses(self: Any, sums: list[tf.Tensor]) -> Any:
        return tf.concat([right_eval(self, sums)[:2], tf.stack(sums[2:]) * 2], axis=0)

    def halved(self: Any, tensor: tf.Tensor) -> tf.Tensor:
        return right_compress(self, tensor) / 2

    right_vector, right_eval = GradientReduction._sum_as_vector, evaluation.EvalStep._reduce
    right_compress = GradientReduction.compress
    defects = {
        "the last group is not summed": (GradientReduction, "plan_groups", without_last_group),
        "sparse rows of each rank alone": (
            GradientReduction,
            "_sum_sparse",
            lambda self, gradient, name: gradients_module.merge_rows(gradient),
        ),
        "pieces that are not summed": (ShardedReduction, "_reduce_scatter", own_pieces),
        "a norm to clip by of own pieces": (ShardedOptimizer, "_sum", lambda self, vector, name: vector),
        "a loss scale that one rank adapts": (
            LossScale,
            "adapt",
            lambda self, is_finite: right_adapt(self, is_finite) if rank else None,
        ),
        "a finite check that one rank ignores": (GradientReduction, "__call__", always_finite),
        "gradients averaged once more": (GradientReduction, "__call__", averaged),
        "a control vector that is not summed": (GradientReduction, "__call__", own_control),
        "clipping before the sum": (GradientReduction, "__call__", clipped_before),
        "a learning rate that grows with the ranks": (step.TrainStep, "__call__", faster_by_ranks),
        "averages that one rank updates": (
            WeightAverages,
            "update",
            lambda self, iterations: None if rank else right_average(self, iterations),
        ),
        "evaluation of each rank's samples": (evaluation.EvalStep, "_reduce", own_losses),
        "the last sample of a rank left out": (SampleOrder, "_plan", without_last_of_rank_1),
        "an order that differs by rank": (order, "permute", order_of_each_rank),
        "statistics of each rank's samples": (normalization, "current_collective", lambda what: None),
        "micro-batches after the first left out": (local_gradients, "_add", lambda first, other: first),
        "a vector whose gradients are not summed": (GradientReduction, "_sum_as_vector", own_vector),
        "compressed gradients of half the size": (GradientReduction, "compress", halved),
        "a bias' gradient doubled on rank 1": (GradientReduction, "__call__", doubled_on_rank_1),
        "a factor of the loss that depends on the rank": (local_gradients, "per_sample", loss_by_rank),
        "the same order in every epoch": (order, "permute", as_in_first_epoch),
        "an epoch's rest in its last batch": (
            SampleOrder,
            "steps_per_epoch",
            property(lambda self: self.num_samples // self.global_batch_size),
        ),
        "the last evaluation batch counted twice": (job, "evaluate", with_last_twice),
        "evaluation's regularisation doubled": (
            evaluation.EvalStep,
            "regularization",
            lambda self: 2 * right_penalty(self),
        ),
        "batch normalization's state kept as it was": (
            step.TrainStep,
            "_reduce_and_update",
            with_old_state,
        ),
        "batch normalization's state weighted by ranks": (step.TrainStep, "_compute_forward", by_ranks),
        "micro-batches that count alike": (local_gradients, "partial_objective", mean_of_micro_batches),
        "dropout's seeds without the step": (
            local_gradients.LocalGradients,
            "_dropout_seeds",
            lambda self, number, micro_batch: right_seeds(self, tf.zeros_like(number), micro_batch),
        ),
        "a reduction that returns its input": (Native, "sum_in_order", its_input),
        "a mean of means": (SampleOrder, "_plan", mean_of_means),
        "a duplicated sample": (SampleOrder, "_plan", duplicated_sample),
        "augmentation seeded by rank": (pipeline, "sample_keys", keys_of_each_rank),
        "a weight that is not broadcast": (step, "broadcast_variables", without("small/output/kernel")),
        "a slot that is not broadcast": (step, "broadcast_variables", without("momentum")),
        "regularisation added on every rank": (local_gradients, "partial_objective", objective_of_each_rank),
    }
    also = {"a reduction that returns its input": [(Native, "all_reduce", its_group)]}
    with contextlib.ExitStack() as stack:
        for place in [defects[defect], *also.get(defect, [])] if defect else []:
            stack.enter_context(mock.patch.object(*place))
        yield
