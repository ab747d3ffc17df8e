"""All that a training run consists of before its first step: data, order, model, optimizer, compiled steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import keras
import tensorflow as tf

from ringtrain.collectives import Collective, raise_on_all_ranks
from ringtrain.collectives.gradients import GradientReduction
from ringtrain.config import DEFAULT_BATCH_SIZE, MAX_STEPS, OPTIMIZER_CLASSES, Config, OptimizerConfig
from ringtrain.data.contents import Contents
from ringtrain.data.order import SampleOrder, StreamingOrder
from ringtrain.data.pipeline import Augment, Batch, describe_structure, has_structure_of, local_batches
from ringtrain.data.sources import ArraySource, FallibleSource, Feed, Source, is_fallible
from ringtrain.data.stepping import Batches, CountedBatches, PlannedBatches, explain_bad
from ringtrain.data.streaming import streaming_batches
from ringtrain.errors import DataError, UsageError
from ringtrain.guard.contents import require_same_contents
from ringtrain.guard.labels import Labels, keeps_labels
from ringtrain.guard.preflight import Facts, describe_training, require_same_code, require_same_training
from ringtrain.run.variables import require_gradients_that_add
from ringtrain.runtime import activity
from ringtrain.runtime.activity import Phase
from ringtrain.step.optimizers import FUSED, only_reads_gradients
from ringtrain.step.schedule import LearningRate
from ringtrain.step.times import StepTimes
from ringtrain.step.train_step import TrainStep, set_precision
from ringtrain.training.evaluation import EvalReport, EvalStep, evaluate, evaluation_batches
from ringtrain.training.sources import open_sources
from ringtrain.workloads.base import Sources, Workload

DEFAULT_EPOCHS = 10


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
    batches: Batches
    step: TrainStep
    evaluation: Source | None
    eval_step: EvalStep | None
    labels_to_check: Sequence[Labels]  # of the first batches: those that were not looked at before
    num_threads: int
    times: StepTimes

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
            skips_bad=self.config.on_bad_sample == "skip",
            is_stop_wanted=is_stop_wanted,
        )

    def is_evaluation_due(self, step: int, *, is_last: bool) -> bool:
        """Every ``eval_every`` steps, or every ``eval_every_epochs`` epochs, and at the end."""
        if self.evaluation is None:
            return False
        if is_last:
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
    former_size: int | None = None,
    adapt_model: Callable[[keras.Model], None] = lambda model: None,
    optimizer: Callable[[], keras.optimizers.Optimizer] | None = None,
    print_line: Callable[[str], None] = lambda line: None,
) -> Job:
    """Read the data, create the model, compile the steps, and see that all ranks have the same. Every rank calls it.

    Args:
        num_threads: processor threads for the input pipeline.
        first_step: the steps that are done already.
        global_batch_size: that of the run's first start, which holds whatever the number of ranks is now.
        former_size: the number of ranks that trained the run up to ``first_step``; None where none has.
        adapt_model: changes the model before anything is compiled.
        optimizer: makes another optimizer than the workload's and the settings'.
        say: shows a line to the user.

    Raises:
        DataError: the data are missing, damaged, or not the same on all ranks.
        UsageError: a setting does not fit the workload, or the models are not the same on all ranks.
    """
    activity.note(Phase.PREPARE, takes_long=True)
    set_up_keras(config)
    sources, contents = open_sources(workload, config, collective, num_threads=num_threads, former_size=former_size)
    order, learning_rate, total_steps = plan_steps(
        workload, config, sources.train, global_batch_size or choose_global_batch_size(config, collective.world.size)
    )
    batches = create_batches(
        sources.train,
        order,
        collective,
        first_step=first_step,
        end_step=total_steps,
        num_threads=num_threads,
        augment=workload.augment,
        skips_bad=config.on_bad_sample == "skip",
        print_line=print_line,
    )
    activity.note(Phase.COMPILE, takes_long=True)
    model = raise_on_all_ranks(collective, lambda: create_model(workload), name="model")
    adapt_model(model)
    spec = batches.element_spec

    def trace() -> tuple[TrainStep, EvalStep | None]:
        chosen = optimizer() if optimizer else choose_optimizer(workload, config, learning_rate(0))
        step = create_step(workload, config, collective, model, chosen, batch_spec=spec, order=order)
        return step, create_eval_step(workload, config, step, sources.evaluation, collective, batch_spec=spec)

    step, eval_step = raise_on_all_ranks(collective, trace, name="step")
    warn_of_python(step, print_line)
    warn_of_own_step(model, print_line)
    job = Job(
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
        labels_to_check=() if is_given_as_it_lies(workload, sources.train) else step.labels,
        num_threads=num_threads,
        times=StepTimes(times_communication=can_time_communication(config)),
    )
    require_same_job(job, sources, contents, print_line)
    return job


def require_same_job(job: Job, sources: Sources, contents: Contents | None, print_line: Callable[[str], None]) -> None:
    """See that all ranks have the same code, model and data, and labels that the model knows. Every rank calls it.

    Raises:
        DataError: their samples differ, or a label is no class of the model.
        UsageError: their code or their models differ.
    """
    collective = job.collective
    require_same_code(collective, name="preflight/code of the job")  # with what data and model have loaded by now
    require_same_training(collective, describe_job(job))
    raise_on_all_ranks(collective, lambda: check_labels(job, sources), name="labels")
    if contents is not None:
        activity.note(Phase.PREPARE, takes_long=True)
        require_same_contents(collective, contents, print_line)


def check_labels(job: Job, sources: Sources) -> None:
    """See that the labels of samples in memory are classes of the model; others are looked at as they are read.

    Raises:
        DataError: one is not.
    """
    for of, source, step in (("training", sources.train, job.step), ("evaluation", sources.evaluation, job.eval_step)):
        if isinstance(source, ArraySource) and step is not None:
            try:
                for labels in step.labels:
                    labels.check(source.y, range(source.num_samples), of=of)
            except DataError:
                if step is job.eval_step or keeps_labels(job.workload.augment, source):
                    raise


def is_given_as_it_lies(workload: Workload, train: Source | Feed) -> bool:
    """Whether the batches have the labels that lie in memory; an ``augment`` of the workload's may change them."""
    return isinstance(train, ArraySource) and getattr(workload.augment, "__func__", None) is Workload.augment


def describe_job(job: Job) -> Facts:
    """What must be alike on all ranks before values travel between them."""
    spec = job.batches.element_spec
    return describe_training(
        job.step.named_variables,
        job.step.optimizer,
        (spec.x, spec.y),
        metrics=job.step.metric_names,
        evaluation_metrics=job.eval_step.metric_names if job.eval_step else (),
        seed=job.order.seed,
        steps_per_epoch=job.order.steps_per_epoch,
        steps=job.total_steps,
        steps_done=job.first_step,
        global_batch_size=job.order.global_batch_size,
    )


def warn_of_python(step: TrainStep, print_line: Callable[[str], None]) -> None:
    """Say what could wait for itself: a ``tf.function`` in a ``tf.py_function`` needs another inter-op thread."""
    if tf.config.threading.get_inter_op_parallelism_threads() != 1:
        return
    names = step.python_operations
    if names:
        print_line(
            f"warning: the step calls Python code ({', '.join(names[:3])}) on this rank's only inter-op thread. A "
            "tf.function in that code would wait for ever; if there is one, set TF_NUM_INTEROP_THREADS=2."
        )


def warn_of_own_step(model: keras.Model, print_line: Callable[[str], None]) -> None:
    """Say that a model's own ``train_step`` trains nothing here."""
    own = [
        name for name in ("train_step", "test_step") if not getattr(type(model), name).__module__.startswith("keras.")
    ]
    if own:
        print_line(
            f"warning: {' and '.join(f'{type(model).__name__}.{name}' for name in own)} is never called: a step here "
            "is the workload's loss, metrics and optimizer. Train such a model by fit, under ringtrain.keras."
        )


def set_up_keras(config: Config) -> None:
    """Precision, seeds and determinism, before anything is created."""
    set_precision(config.precision)
    keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()


def plan_steps(
    workload: Workload, config: Config, train: Source | Feed, global_batch_size: int
) -> tuple[SampleOrder, LearningRate, int]:
    """The order of samples, the learning rate and the number of steps: all that the number of ranks could enter."""
    order: SampleOrder
    if isinstance(train, Feed):
        steps_per_epoch = train.steps_per_epoch or config.steps
        if steps_per_epoch is None:
            raise UsageError(
                "how long the training lasts is not known: its samples are fed by code that does not say how many "
                "steps an epoch has. Give --steps (the run ends before that where no rank has samples left), or "
                "steps_per_epoch to from_generator or from_callable.",
                reach="run",
            )
        order = StreamingOrder(
            num_samples=steps_per_epoch * global_batch_size,
            global_batch_size=global_batch_size,
            seed=config.seed,
            is_single_pass=train.steps_per_epoch is None,
        )
    else:
        order = SampleOrder(num_samples=train.num_samples, global_batch_size=global_batch_size, seed=config.seed)
    total_steps = config.steps or (config.epochs or DEFAULT_EPOCHS) * order.steps_per_epoch
    if total_steps > MAX_STEPS:
        raise UsageError(
            f"{config.epochs or DEFAULT_EPOCHS} epochs of {order.steps_per_epoch} steps are {total_steps:,} steps; "
            f"there may be at most {MAX_STEPS:,}. Give fewer --epochs, or --steps.",
            reach="run",
        )
    defaults = workload.defaults
    own_batch_size = defaults.get("global_batch_size") or defaults.get("batch_size", DEFAULT_BATCH_SIZE)
    learning_rate = LearningRate(
        optimizer=config.optimizer,
        batch_ratio=global_batch_size / own_batch_size,
        samples_per_epoch=order.num_samples,
        total_samples=order.samples_before(total_steps),
    )
    return order, learning_rate, total_steps


def create_batches(
    train: Source | Feed,
    order: SampleOrder,
    collective: Collective,
    *,
    first_step: int,
    end_step: int,
    num_threads: int,
    augment: Augment,
    skips_bad: bool,
    print_line: Callable[[str], None],
) -> Batches:
    """This rank's batches of the steps from ``first_step`` (from 0) up to, not including, ``end_step``."""
    steps: dict[str, Any] = {"first_step": first_step, "end_step": end_step}
    read: dict[str, Any] = {"num_threads": num_threads, "augment": augment}
    world = collective.world
    if isinstance(train, Feed):
        fed = streaming_batches(train, cast(StreamingOrder, order), collective, **steps, **read)
        return CountedBatches(fed.dataset, collective, order, **steps, explain=fed.explain)

    explain = functools.partial(explain_bad, train, order, world)
    skips = skips_bad and is_fallible(train)
    trace = functools.partial(local_batches, train, order, world, **steps, **read, skips_bad=skips)
    dataset = raise_on_all_ranks(collective, trace, name="batches")
    if not skips:
        return PlannedBatches(dataset, **steps, explain=explain)
    find_bad = cast(FallibleSource, train).find_bad
    return CountedBatches(
        dataset, collective, order, **steps, explain=explain, find_bad=find_bad, print_line=print_line
    )


def create_step(
    workload: Workload,
    config: Config,
    collective: Collective,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    *,
    batch_spec: Batch,
    order: SampleOrder,
) -> TrainStep:
    """The compiled training step of the settings."""
    require_gradients_that_add(model.trainable_variables)
    world = collective.world
    is_known = not isinstance(order, StreamingOrder) and config.on_bad_sample == "stop"
    first = len(order.local_batch(0, rank=world.rank, size=world.size).indices)
    return TrainStep(
        workload=workload,
        model=model,
        optimizer=optimizer,
        reduction=GradientReduction(
            collective=collective,
            compression=config.compression,
            read_only=only_reads_gradients(optimizer),
        ),
        batch_spec=batch_spec,
        precision=config.precision,
        accumulate=config.accumulate,
        ema=config.optimizer.ema,
        seed=config.seed,
        local_batch_size=first or None if is_known else None,
        times_communication=can_time_communication(config),
    )


def can_time_communication(config: Config) -> bool:
    """Whether the step may ask for the time: see ``TrainStep``."""
    return not (config.deterministic or tf.config.get_visible_devices("GPU"))


def create_eval_step(
    workload: Workload,
    config: Config,
    step: TrainStep,
    evaluation: Source | None,
    collective: Collective,
    *,
    batch_spec: Batch,
) -> EvalStep | None:
    """The compiled evaluation; None where there is nothing to evaluate on. ``batch_spec`` is the training's."""
    if evaluation is None:
        check_best_metric(config, step.metric_names)
        return None
    spec = evaluation_batches(evaluation, collective.world, global_batch_size=1, num_threads=1).element_spec
    require_same_structure(workload, batch_spec, spec)
    eval_step = EvalStep(
        workload=workload,
        model=step.model,
        averages=step.averages,
        collective=collective,
        batch_spec=spec,
    )
    check_best_metric(config, eval_step.metric_names)
    return eval_step


def require_same_structure(workload: Workload, train: Batch, evaluation: Batch) -> None:
    """See that the samples to evaluate on have the structure of those to train on.

    Args:
        train, evaluation: tensor specs of batches.

    Raises:
        UsageError: they have another.
    """
    for name in ("x", "y"):
        specs = getattr(train, name), getattr(evaluation, name)
        if not has_structure_of(*specs):
            raise UsageError(
                f"{type(workload).__name__}.create_sources gives the {name} of the training samples as "
                f"{describe_structure(specs[0])}, but that of the evaluation samples as "
                f"{describe_structure(specs[1])}; both must be of one structure.",
                reach="run",
            )


def choose_global_batch_size(config: Config, size: int) -> int:
    """The samples of one step over all ranks."""
    return config.global_batch_size or (config.batch_size or DEFAULT_BATCH_SIZE) * config.accumulate * size


def check_best_metric(config: Config, metric_names: Sequence[str]) -> None:
    """See that an evaluation gives the value that the best checkpoint is chosen by, besides loss these metrics.

    Raises:
        UsageError: it does not.
    """
    names = ("loss", "data_loss", *metric_names)
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
        UsageError: the workload's is none, or reduces gradients itself, which the training step does already.
    """
    own = workload.create_optimizer(first_learning_rate)
    if own is not None and not isinstance(own, keras.optimizers.Optimizer):
        raise UsageError(
            f"{type(workload).__name__}.create_optimizer gave a {type(own).__name__}; it must give a Keras 3 "
            "optimizer, such as keras.optimizers.Adam(learning_rate), or None for that of the settings.",
            reach="run",
        )
    optimizer = own or create_optimizer(config.optimizer)
    if hasattr(optimizer, "exchange"):  # ringtrain.keras.DistributedOptimizer, whose room need not be loaded here
        raise UsageError(
            f"{type(workload).__name__}.create_optimizer gave a DistributedOptimizer, but the training step reduces "
            "gradients itself: give the plain optimizer.",
            reach="run",
        )
    return optimizer


def create_optimizer(settings: OptimizerConfig) -> keras.optimizers.Optimizer:
    """The Keras optimizer of the settings. Its clipping acts on the gradients that it is given: the reduced ones."""
    options = {
        name: value
        for name, value in (
            ("momentum", settings.momentum),
            ("nesterov", settings.nesterov),
            ("rho", settings.rho),
            ("epsilon", settings.epsilon),
            ("weight_decay", settings.weight_decay),
            ("global_clipnorm", settings.clip_global_norm),
        )
        if value
    }
    optimizer_class = FUSED.get(settings.name) or getattr(keras.optimizers, OPTIMIZER_CLASSES[settings.name])
    return optimizer_class(learning_rate=settings.lr, **options)
