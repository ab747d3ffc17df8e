"""Training. ``train`` is the whole of it; what it calls stands below, in the order in which it is called."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import keras
import tensorflow as tf

from ringtrain.actions import Action, Evaluate, Log
from ringtrain.collectives import Collective, agree, gather_objects
from ringtrain.collectives.reduce import GradientReduction
from ringtrain.config import OPTIMIZER_CLASSES, Config, OptimizerConfig
from ringtrain.console import Console
from ringtrain.data.order import SampleOrder
from ringtrain.data.pipeline import Batch, local_batches
from ringtrain.data.sources import Source
from ringtrain.errors import DivergedError, UsageError
from ringtrain.evaluation import EvalReport, EvalStep, evaluate
from ringtrain.loss_scale import MIN_LOSS_SCALE
from ringtrain.run_directory import RunDirectory
from ringtrain.schedule import LearningRate
from ringtrain.step import StepReport, TrainStep, set_precision
from ringtrain.workloads.base import Workload

DEFAULT_EPOCHS = 10
DEFAULT_BATCH_SIZE = 32
MAX_SKIPPED_IN_A_ROW = 10
BROADCAST_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a training run consists of, on one rank, before its first step."""

    config: Config
    collective: Collective
    order: SampleOrder
    learning_rate: LearningRate
    total_steps: int
    batches: tf.data.Dataset
    step: TrainStep
    evaluation: Source | None
    eval_step: EvalStep | None
    num_threads: int


def train(
    workload: Workload,
    config: Config,
    collective: Collective,
    *,
    run: RunDirectory | None,
    console: Console,
    num_threads: int,
) -> EvalReport | None:
    """Train a workload. Every rank calls it, with the same workload and configuration.

    Args:
        run: the run directory on rank 0, None on the others.
        num_threads: processor threads for the input pipeline.

    Returns:
        The last evaluation; None where the workload has nothing to evaluate on.

    Raises:
        DataError: the data are missing or damaged.
        DivergedError: the loss or a gradient was not finite.
    """
    job = create_job(workload, config, collective, num_threads=num_threads)
    share_first_values(job.step.variables, collective)
    describe(job, console, run)
    actions, evaluation = create_actions(job, run, console)
    console.start_progress(job.total_steps, 0)
    try:
        run_steps(job, actions, console)
    finally:
        console.stop_progress()
    return evaluation.last if evaluation else None


def create_job(
    workload: Workload,
    config: Config,
    collective: Collective,
    *,
    num_threads: int,
    adapt_model: Callable[[keras.Model], None] = lambda model: None,
    optimizer: Callable[[], keras.optimizers.Optimizer] | None = None,
) -> Job:
    """Read the data, create the model, and compile the steps.

    Args:
        adapt_model: changes the model before anything is compiled.
        optimizer: makes another optimizer than the workload's and the settings'.
    """
    set_up_keras(config)
    read = functools.partial(workload.create_sources, config.data_dir, synthetic=config.synthetic)
    sources = agree(collective, read, name="sources")
    order, learning_rate, total_steps = plan_steps(workload, config, sources.train.num_samples, collective.world.size)
    batches = local_batches(
        sources.train,
        order,
        collective.world,
        first_step=0,
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
        seed=config.seed,
    )
    eval_step = None
    if sources.evaluation is not None:
        eval_step = EvalStep(workload=workload, model=model, batch_spec=batches.element_spec)
    return Job(
        config=config,
        collective=collective,
        order=order,
        learning_rate=learning_rate,
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
    workload: Workload, config: Config, num_samples: int, size: int
) -> tuple[SampleOrder, LearningRate, int]:
    """The order of samples, the learning rate and the number of steps: all that the number of ranks could enter."""
    global_batch_size = choose_global_batch_size(config, size)
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


def share_first_values(variables: Sequence[keras.Variable], collective: Collective) -> None:
    """Give every rank rank 0's values, many variables to a message."""
    for number, group in enumerate(plan_messages(variables)):
        flat = tf.concat([tf.reshape(variable.value, [-1]) for variable in group], axis=0)
        [first] = collective.broadcast([flat], name=f"first_values/{number}")
        sizes = [math.prod(variable.shape) for variable in group]
        for variable, values in zip(group, tf.split(first, sizes), strict=True):
            variable.assign(tf.reshape(values, variable.shape))


def plan_messages(variables: Sequence[keras.Variable]) -> list[list[keras.Variable]]:
    """Variables by type, in messages of at most BROADCAST_BYTES unless one variable is larger."""
    messages: list[list[keras.Variable]] = []
    open_messages: dict[str, tuple[list[keras.Variable], int]] = {}
    for variable in variables:
        num_bytes = math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
        message, filled = open_messages.get(variable.dtype, ([], 0))
        if not message or filled + num_bytes > BROADCAST_BYTES:
            message, filled = [], 0
            messages.append(message)
        message.append(variable)
        open_messages[variable.dtype] = (message, filled + num_bytes)
    return messages


def describe(job: Job, console: Console, run: RunDirectory | None) -> None:
    """Say what is about to be trained."""
    order, size = job.order, job.collective.world.size
    parameters = job.step.model.count_params()
    evaluated = f", {job.evaluation.num_samples:,} to evaluate on" if job.evaluation else ""
    console.line(f"{job.config.workload}: {parameters:,} parameters; {order.num_samples:,} samples{evaluated}")
    console.line(
        f"global batch {order.global_batch_size} over {size} rank{'s' if size > 1 else ''}; "
        f"{order.steps_per_epoch} steps an epoch, {job.total_steps} in all"
    )
    if run is not None:
        run.write_event(
            "start",
            workload=job.config.workload,
            size=size,
            samples=order.num_samples,
            global_batch_size=order.global_batch_size,
            steps_per_epoch=order.steps_per_epoch,
            total_steps=job.total_steps,
            parameters=parameters,
        )


def create_actions(job: Job, run: RunDirectory | None, console: Console) -> tuple[list[Action], Evaluate | None]:
    """The log, on rank 0, and the evaluation, on every rank."""
    log = None
    if run is not None:
        every, last_step = job.config.log_every, job.total_steps
        log = Log(console=console, run=run, order=job.order, every=every, first_step=0, last_step=last_step)
    actions: list[Action] = [log] if log else []
    evaluation = None
    if job.evaluation is not None and job.eval_step is not None:
        source, eval_step = job.evaluation, job.eval_step
        evaluation = Evaluate(
            evaluate=lambda: evaluate(
                eval_step,
                source,
                job.collective,
                global_batch_size=job.order.global_batch_size,
                num_threads=job.num_threads,
            ),
            is_due=lambda step: is_evaluation_due(job, step),
            console=console,
            run=run,
            order=job.order,
            log=log,
        )
        actions.append(evaluation)
    return actions, evaluation


def is_evaluation_due(job: Job, step: int) -> bool:
    """Every ``eval_every`` steps, or every ``eval_every_epochs`` epochs, and at the end."""
    if step == job.total_steps:
        return True
    every = job.config.eval_every or job.config.eval_every_epochs * job.order.steps_per_epoch
    return every > 0 and step % every == 0


def run_steps(job: Job, actions: Sequence[Action], console: Console) -> None:
    """Train all steps, and act after those after which something is due.

    On a GPU the host looks at step k while the device computes step k+1, so that the device never waits for the host;
    on cores, where a step is done when the call returns, it looks at once.
    """
    steps_ahead = 1 if tf.config.get_visible_devices("GPU") else 0
    in_flight: collections.deque[tuple[int, Batch, tf.Tensor]] = collections.deque()
    guard = NonfiniteGuard(job, console)
    for index, batch in enumerate(job.batches):
        returned = job.step(batch, job.learning_rate(job.order.samples_before(index)))
        step = index + 1  # the steps done with this one
        in_flight.append((step, batch, returned))
        pauses = step == job.total_steps or any(action.needs_weights and action.is_due(step) for action in actions)
        while len(in_flight) > (0 if pauses else steps_ahead):
            settle(job, actions, guard, *in_flight.popleft())


def settle(
    job: Job, actions: Sequence[Action], guard: NonfiniteGuard, step: int, batch: Batch, returned: tf.Tensor
) -> None:
    """Look at a step's outcome, and act where something is due."""
    guard.check(step, returned)
    due = [action for action in actions if action.is_due(step)]
    if due:
        report = job.step.read(returned)
        for action in due:
            action.act(step, batch, report)


class NonfiniteGuard:
    """Decides, alike on every rank, about steps whose loss or gradient was not finite."""

    def __init__(self, job: Job, console: Console) -> None:
        self._job, self._console = job, console
        self._skipped_in_a_row = 0

    def check(self, step: int, returned: tf.Tensor) -> None:
        """Look at the outcome of a step.

        Raises:
            DivergedError: on every rank, where the step changed nothing and the run is not to go on.
        """
        if self._job.step.is_updated(returned):
            self._skipped_in_a_row = 0
            return
        report = self._job.step.read(returned)
        if self._job.config.precision == "mixed_float16" and report.loss_scale > MIN_LOSS_SCALE:
            return  # the loss scale was too high; it has been halved, and that is how it finds its value
        self._skipped_in_a_row += 1
        message = self._explain(step, report)
        if self._job.config.on_nonfinite == "stop":
            raise DivergedError(
                f"{message} Nothing was updated by this step. Lower --optimizer.lr, add --optimizer.clip_global_norm "
                "or --optimizer.warmup_epochs, look at the data, or go on with --on_nonfinite skip.",
                reach="run",
            )
        if self._skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise DivergedError(f"{message} That is {MAX_SKIPPED_IN_A_ROW} skipped steps in a row.", reach="run")
        self._console.line(f"warning: {message} Skipped: nothing was updated by this step.")

    def _explain(self, step: int, report: StepReport) -> str:
        """Who had it: every rank is here, for the same reduced numbers."""
        collective = self._job.collective
        mine = {"loss": str(report.local_data_loss), "finite": math.isfinite(report.local_data_loss)}
        ranks = gather_objects(collective, mine | {"node": collective.world.node}, name="nonfinite")
        culprits = [
            f"rank {rank} on {item['node']} (sum of its samples' losses: {item['loss']})"
            for rank, item in enumerate(ranks)
            if not item["finite"]
        ]
        who = " and ".join(culprits) or "no rank's loss, so only in a gradient (an overflow in the backward pass)"
        return f"step {step}: loss or gradient is not finite; seen in the loss of {who}."


def run_path(config: Config) -> tuple[Path, bool]:
    """Where the run is to be kept, and whether the user named that very directory."""
    if config.out is not None:
        return config.out, True
    return Path("runs") / Path(config.workload.rpartition(":")[2]).name.lower(), False
