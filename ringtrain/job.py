"""All that a training run consists of before its first step: data, order, model, optimizer, compiled steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import keras
import tensorflow as tf

from ringtrain.collectives import Collective, agree
from ringtrain.collectives.reduce import GradientReduction
from ringtrain.config import OPTIMIZER_CLASSES, Config, OptimizerConfig
from ringtrain.data.order import SampleOrder
from ringtrain.data.pipeline import local_batches
from ringtrain.data.sources import Source
from ringtrain.errors import UsageError
from ringtrain.evaluation import EvalReport, EvalStep, evaluate
from ringtrain.schedule import LearningRate
from ringtrain.step import TrainStep, set_precision
from ringtrain.workloads.base import Workload

DEFAULT_EPOCHS = 10
DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a training run consists of, on one rank, before its first step."""

    workload: Workload
    config: Config
    collective: Collective
    order: SampleOrder
    learning_rate: LearningRate
    first_step: int
    total_steps: int
    batches: tf.data.Dataset
    step: TrainStep
    evaluation: Source | None
    eval_step: EvalStep | None
    num_threads: int

    def evaluate(self, is_stop_wanted: Callable[[], bool] = lambda: False) -> EvalReport | None:
        """Evaluate on all ranks; None where there is nothing to evaluate on, or a rank wanted to stop meanwhile."""
        if self.evaluation is None or self.eval_step is None:
            return None
        return evaluate(
            self.eval_step,
            self.evaluation,
            self.collective,
            global_batch_size=self.order.global_batch_size,
            num_threads=self.num_threads,
            is_stop_wanted=is_stop_wanted,
        )

    def is_evaluation_due(self, step: int) -> bool:
        """Every ``eval_every`` steps, or every ``eval_every_epochs`` epochs, and at the end."""
        if self.evaluation is None:
            return False
        if step == self.total_steps:
            return True
        every = self.config.eval_every or self.config.eval_every_epochs * self.order.steps_per_epoch
        return every > 0 and step % every == 0


def create_job(
    workload: Workload,
    config: Config,
    collective: Collective,
    *,
    num_threads: int,
    first_step: int = 0,
    global_batch_size: int | None = None,
    adapt_model: Callable[[keras.Model], None] = lambda model: None,
    optimizer: Callable[[], keras.optimizers.Optimizer] | None = None,
) -> Job:
    """Read the data, create the model, and compile the steps.

    Args:
        num_threads: processor threads for the input pipeline.
        first_step: the steps that are done already.
        global_batch_size: that of the run's first start, which holds whatever the number of ranks is now.
        adapt_model: changes the model before anything is compiled.
        optimizer: makes another optimizer than the workload's and the settings'.
    """
    set_up_keras(config)
    read = functools.partial(workload.create_sources, config.data_dir, synthetic=config.synthetic)
    sources = agree(collective, read, name="sources")
    order, learning_rate, total_steps = plan_steps(
        workload,
        config,
        sources.train.num_samples,
        global_batch_size or choose_global_batch_size(config, collective.world.size),
    )
    batches = local_batches(
        sources.train,
        order,
        collective.world,
        first_step=first_step,
        end_step=total_steps,
        num_threads=num_threads,
        augment=workload.augment,
    )
    model = agree(collective, lambda: create_model(workload), name="model")
    adapt_model(model)
    step = TrainStep(
        workload=workload,
        model=model,
        optimizer=optimizer() if optimizer else choose_optimizer(workload, config, learning_rate(0)),
        reduction=GradientReduction(collective=collective, compression=config.compression),
        batch_spec=batches.element_spec,
        precision=config.precision,
        accumulate=config.accumulate,
        ema=config.optimizer.ema,
        seed=config.seed,
    )
    eval_step = None
    if sources.evaluation is not None:
        eval_step = EvalStep(
            workload=workload,
            model=model,
            averages=step.averages,
            collective=collective,
            batch_spec=batches.element_spec,
        )
        check_best_metric(config, eval_step)
    return Job(
        workload=workload,
        config=config,
        collective=collective,
        order=order,
        learning_rate=learning_rate,
        first_step=first_step,
        total_steps=total_steps,
        batches=batches,
        step=step,
        evaluation=sources.evaluation,
        eval_step=eval_step,
        num_threads=num_threads,
    )


def set_up_keras(config: Config) -> None:
    """Precision, seeds and determinism, before anything is created."""
    set_precision(config.precision)
    keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()


def plan_steps(
    workload: Workload, config: Config, num_samples: int, global_batch_size: int
) -> tuple[SampleOrder, LearningRate, int]:
    """The order of samples, the learning rate and the number of steps: all that the number of ranks could enter."""
    order = SampleOrder(num_samples=num_samples, global_batch_size=global_batch_size, seed=config.seed)
    total_steps = config.steps or (config.epochs or DEFAULT_EPOCHS) * order.steps_per_epoch
    learning_rate = LearningRate(
        optimizer=config.optimizer,
        batch_ratio=global_batch_size / workload.defaults.get("batch_size", DEFAULT_BATCH_SIZE),
        samples_per_epoch=num_samples,
        total_samples=order.samples_before(total_steps),
    )
    return order, learning_rate, total_steps


def choose_global_batch_size(config: Config, size: int) -> int:
    """The samples of one step over all ranks."""
    return config.global_batch_size or (config.batch_size or DEFAULT_BATCH_SIZE) * config.accumulate * size


def check_best_metric(config: Config, eval_step: EvalStep) -> None:
    """See that the evaluation gives the value that the best checkpoint is chosen by.

    Raises:
        UsageError: it does not.
    """
    names = ("loss", "data_loss", *eval_step.metric_names)
    if config.best_metric not in names:
        raise UsageError(
            f"best_metric is {config.best_metric!r}; an evaluation of {config.workload!r} gives {', '.join(names)}.",
            reach="run",
        )


def create_model(workload: Workload) -> keras.Model:
    """The workload's model.

    Raises:
        UsageError: it is no built Keras model.
    """
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
    """The workload's own optimizer, or that of the settings.

    Raises:
        UsageError: the workload's reduces gradients itself, which the training step does already.
    """
    optimizer = workload.create_optimizer(first_learning_rate) or create_optimizer(config.optimizer)
    if hasattr(optimizer, "exchange"):  # ringtrain.keras.DistributedOptimizer, whose room need not be loaded here
        raise UsageError(
            f"{type(workload).__name__}.create_optimizer gave a DistributedOptimizer, but the training step reduces "
            "gradients itself: give the plain optimizer.",
            reach="run",
        )
    return optimizer


def create_optimizer(settings: OptimizerConfig) -> keras.optimizers.Optimizer:
    """The Keras optimizer of the settings. Its clipping acts on the gradients that it is given: the reduced ones."""
    options: dict[str, float | bool] = {}
    if settings.momentum:
        options["momentum"] = settings.momentum
    if settings.nesterov:
        options["nesterov"] = True
    if settings.weight_decay:
        options["weight_decay"] = settings.weight_decay
    if settings.clip_global_norm:
        options["global_clipnorm"] = settings.clip_global_norm
    optimizer_class = getattr(keras.optimizers, OPTIMIZER_CLASSES[settings.name])
    return optimizer_class(learning_rate=settings.lr, **options)
