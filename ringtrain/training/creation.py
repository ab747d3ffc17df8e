"""Creation of model, optimizer and compiled steps from workload and settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ringtrain.collectives import Collective
from ringtrain.collectives.gradients import GradientReduction
from ringtrain.config import OPTIMIZER_CLASSES, Config, OptimizerConfig
from ringtrain.data.order import SampleOrder
from ringtrain.data.pipeline import Batch, describe_structure, has_structure_of, with_batch_size
from ringtrain.data.sources import Source
from ringtrain.errors import NO_HOROVOD_SIGN, UsageError
from ringtrain.messages.log import LOG
from ringtrain.messages.rules import list_first
from ringtrain.run.variables import require_gradients_that_add
from ringtrain.runtime.private import all_layers, exclude_paths_from_decay
from ringtrain.step.compiled import StepFacts, decide_on_xla, find_unsupported_layers, has_unknown_lengths
from ringtrain.step.optimizers import OWN, only_reads_gradients
from ringtrain.step.state import is_integer_or_bool
from ringtrain.step.train_step import TrainStep, set_precision
from ringtrain.training.evaluation import EvalStep, Evaluation, evaluation_batches
from ringtrain.workloads.base import Workload
from ringtrain.workloads.stateful_metrics import create_stateful_metrics
from ringtrain.workloads.values import needs_every_rank

# Of ringtrain.keras' and Horovod's DistributedOptimizer; neither is imported here.
MARKS_OF_DISTRIBUTED = ("exchange", "_allreduce_grads")


def set_up_keras(config: Config) -> None:
    """Call it before anything is created."""
    set_precision(config.precision)
    keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()


def create_model(workload: Workload) -> keras.Model:
    model = workload.create_model()
    if not isinstance(model, keras.Model) or not model.built:
        raise UsageError(
            f"{type(workload).__name__}.create_model gave {type(model).__name__}; it must give a built keras.Model: "
            "begin with keras.Input, or call model.build(...).",
        )
    if not model.trainable_variables:
        raise UsageError(f"the model of {type(workload).__name__} has no trainable variables: nothing can be trained.")
    return model


def choose_optimizer(workload: Workload, config: Config, first_learning_rate: float) -> keras.optimizers.Optimizer:
    method = f"{type(workload).__name__}.create_optimizer"
    reduces_itself = UsageError(
        f"{method} gave a DistributedOptimizer, but the training step reduces gradients itself: give the plain "
        "optimizer, such as keras.optimizers.Adam(learning_rate)."
    )
    try:
        own = workload.create_optimizer(first_learning_rate)
    except UsageError as error:
        raise (reduces_itself if NO_HOROVOD_SIGN in str(error) else error) from None
    if own is not None and not isinstance(own, keras.optimizers.Optimizer):
        raise UsageError(
            f"{method} gave a {type(own).__name__}; it must give a Keras 3 optimizer, such as "
            "keras.optimizers.Adam(learning_rate), or None for that of the settings."
        )
    optimizer = own or create_optimizer(config.optimizer)
    if any(hasattr(optimizer, name) for name in MARKS_OF_DISTRIBUTED):
        raise reduces_itself
    return optimizer


def create_optimizer(settings: OptimizerConfig) -> keras.optimizers.Optimizer:
    """Clipping acts on the reduced gradients."""
    optimizer_class: Any = OWN.get(settings.name) or getattr(keras.optimizers, OPTIMIZER_CLASSES[settings.name])
    accepted = set(inspect.signature(optimizer_class).parameters) - {"name"}
    options = {name: value for name, value in vars(settings).items() if name in accepted}
    given = {name: value for name, value in options.items() if value}
    clipnorm = settings.clip_global_norm or None
    optimizer = optimizer_class(learning_rate=settings.lr, global_clipnorm=clipnorm, **given)
    if words := settings.excluded_words:
        exclude_paths_from_decay(optimizer, words)
    return optimizer


def create_step(
    workload: Workload,
    config: Config,
    collective: Collective,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    batch_spec: Batch,
    order: SampleOrder,
    *,
    in_groups: bool | None = None,
) -> TrainStep:
    """``in_groups``: see ``GradientReduction``."""
    require_gradients_that_add(model.trainable_variables)
    world = collective.world
    xla = decide_on_xla(config.jit_compile, find_facts(workload, config, model, batch_spec))
    # The planned size, which most batches have.
    usual = len(order.local_batch(0, rank=world.rank, size=world.size).indices)
    stateful_metrics = create_stateful_metrics(workload, model, batch_spec, batch_size=usual)
    step = TrainStep(
        workload=workload,
        config=config,
        model=model,
        optimizer=optimizer,
        reduction=GradientReduction(
            collective=collective,
            compression=config.compression,
            in_groups=in_groups,
            read_only=only_reads_gradients(optimizer),
        ),
        batch_spec=batch_spec,
        local_batch_size=usual or None,
        times_communication=not (config.deterministic or has_gpu()),
        jit_compile=xla.compiles,
        stateful_metrics=stateful_metrics,
    )
    if xla.why_not:
        LOG.info(f"XLA compiles no part of the step: {xla.why_not}.")
    elif xla.compiles:
        LOG.info("XLA compiles each rank's forward and backward pass; sums and update are not compiled.")
    twice = [name for name in stateful_metrics.names if name in step.metric_names]
    if twice:
        raise UsageError(
            f"{type(workload).__name__} gives {twice[0]!r} in metrics and in create_metrics. Leave it out of one."
        )
    return step


def find_facts(workload: Workload, config: Config, model: keras.Model, batch_spec: Batch) -> StepFacts:
    return StepFacts(
        has_gpu=has_gpu(),
        is_deterministic=config.deterministic,
        asks_other_ranks=needs_every_rank(workload, model),
        has_unknown_lengths=has_unknown_lengths(tf.nest.flatten((batch_spec.x, batch_spec.y))),
        unsupported_layers=find_unsupported_layers(all_layers(model)),
    )


def has_gpu() -> bool:
    """Return True if this process trains on a GPU. The ranks have compared their devices."""
    return bool(tf.config.get_visible_devices("GPU"))


def warn_of_settings(workload: Workload, config: Config, step: TrainStep, *, is_parallel: bool) -> None:
    if why := describe_python(step.python_operations):
        LOG.warning(why)
    if own := find_own_steps(step.model):
        LOG.warning(
            f"{' and '.join(own)} is never called: a step here is the workload's loss, metrics and optimizer. "
            "Train such a model by fit, under ringtrain.keras."
        )
    warn_of_best(config)
    if config.shard_optimizer and step.sharded is None:
        LOG.warning("--shard_optimizer has no effect: a single rank updates all weights.")
    if is_parallel and config.accumulate > 1 and workload.needs_every_rank:
        LOG.warning(
            f"--accumulate {config.accumulate}: the loss of {type(workload).__name__} compares the samples of "
            "a micro-batch, and those of the ranks together are not those of one process. The ranks train similar "
            "weights, but not the same."
        )
    if is_parallel and (paths := find_micro_batch_state(config, step)):
        LOG.warning(
            f"--accumulate {config.accumulate} updates {list_first(paths)} once for each micro-batch, and a "
            "rank's micro-batches are not those of one process: the ranks together train similar weights, but not the "
            "same. Without --accumulate there is one update for each step."
        )


def find_micro_batch_state(config: Config, step: TrainStep) -> list[str]:
    """For example SyncBatchNormalization's statistics."""
    return [v.path for v in step.state if not is_integer_or_bool(v)] if config.accumulate > 1 else []


def warn_of_best(config: Config) -> None:
    if config.best_direction == "min" and config.best_metric.endswith(("accuracy", "acc")):
        LOG.warning(
            f"the best checkpoint is the one of the smallest {config.best_metric}; for the largest give "
            "best_direction max."
        )


def create_evaluation(
    workload: Workload,
    config: Config,
    step: TrainStep,
    source: Source | None,
    collective: Collective,
    batch_spec: Batch,
    *,
    global_batch_size: int,
    num_threads: int,
    run_directory: Path | None,
) -> Evaluation | None:
    evaluation = None
    if source is not None:
        batches = evaluation_batches(
            source,
            collective.world,
            global_batch_size=global_batch_size,
            num_threads=num_threads,
            run_directory=run_directory,
        )
        require_same_structure(workload, batch_spec, batches.element_spec)
        eval_spec = batches.element_spec
        if step.row_state:  # a model with a fixed batch size takes no other
            eval_spec = with_batch_size(eval_spec, step.row_state[0].shape[0])
        eval_step = EvalStep(
            workload=workload,
            model=step.model,
            averages=step.averages,
            collective=collective,
            batch_spec=eval_spec,
            row_state=step.row_state,
            stateful_metrics=create_stateful_metrics(workload, step.model, eval_spec, batch_size=None),
        )
        evaluation = Evaluation(eval_step, source, batches)
    of_step = step if evaluation is None else evaluation.step
    names = ("loss", "data_loss", *of_step.metric_names, *of_step.stateful_metrics.names)
    if config.best_metric not in names:
        raise UsageError(
            f"best_metric is {config.best_metric!r}; an evaluation of {config.workload!r} gives {', '.join(names)}."
        )
    return evaluation


def require_same_structure(workload: Workload, train: Batch, evaluation: Batch) -> None:
    for name in ("x", "y"):
        specs = getattr(train, name), getattr(evaluation, name)
        if not has_structure_of(*specs):
            raise UsageError(
                f"{type(workload).__name__}.create_sources gives the {name} of the training samples as "
                f"{describe_structure(specs[0])}, but that of the evaluation samples as "
                f"{describe_structure(specs[1])}; both must be of one structure."
            )


def describe_python(find: Callable[[], Sequence[str]]) -> str:
    """Describe a possible deadlock: a ``tf.function`` in a ``tf.py_function`` needs another inter-op thread."""
    if tf.config.threading.get_inter_op_parallelism_threads() != 1 or not (names := find()):
        return ""
    return (
        f"the step calls Python code ({', '.join(names[:3])}) on this rank's only inter-op thread. A tf.function in "
        "that code would wait for ever; in that case set TF_NUM_INTEROP_THREADS=2."
    )


def find_own_steps(model: keras.Model) -> list[str]:
    names = ("train_step", "test_step")
    own = [name for name in names if not getattr(type(model), name).__module__.startswith("keras.")]
    return [f"{type(model).__name__}.{name}" for name in own]
