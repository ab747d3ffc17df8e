"""Everything that a run creates before its first step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import keras
import tensorflow as tf

from ringtrain.collectives import Collective, raise_on_all_ranks
from ringtrain.config import DEFAULT_BATCH_SIZE, Config, flatten_settings
from ringtrain.data.batches import Batches
from ringtrain.data.contents import Contents
from ringtrain.data.sources import ArraySource, Feed
from ringtrain.data.streaming import with_steps_of_its_own
from ringtrain.data.unreadable import unreadable_error
from ringtrain.errors import DataError, UsageError
from ringtrain.guard.contents import require_same_contents
from ringtrain.guard.labels import Labels, keeps_labels
from ringtrain.guard.preflight import (
    OTHER_MODEL,
    describe_layers,
    plain,
    require_alike,
    require_same_code,
    require_same_sources,
)
from ringtrain.messages.defects import describe_defect
from ringtrain.run.resume import Progress, Start
from ringtrain.runtime.activity import Phase, set_phase
from ringtrain.step.assignments import states_of_stateful_layers
from ringtrain.step.many_steps import ManySteps
from ringtrain.step.times import StepTimes
from ringtrain.step.train_step import TrainStep
from ringtrain.training.creation import (
    choose_optimizer,
    create_evaluation,
    create_model,
    create_step,
    set_up_keras,
    warn_of_settings,
)
from ringtrain.training.evaluation import EvalReport, Evaluation, evaluate
from ringtrain.training.plan import Plan, create_batches, own_augment, plan_steps
from ringtrain.training.row_state import require_full_batches, require_same_size
from ringtrain.workloads.base import Sources, Workload

FRESH = Start(path="")


@dataclass(frozen=True, kw_only=True)
class Job:
    workload: Workload
    config: Config
    collective: Collective
    plan: Plan
    batches: Batches
    step: TrainStep
    evaluation: Evaluation | None
    labels_to_check: Sequence[Labels]  # of the first batches, unless checked in memory
    many_steps: ManySteps
    times: StepTimes
    contents: Contents

    def evaluate(self, is_stop_wanted: Callable[[], bool] = lambda: False) -> EvalReport | None:
        """Return None without evaluation data, or if a rank was asked to stop."""
        if self.evaluation is None:
            return None
        return evaluate(self.evaluation.step, self.evaluation.batches, self.collective, is_stop_wanted=is_stop_wanted)

    def is_evaluation_due(self, step: int, *, is_last: bool) -> bool:
        if self.evaluation is None:
            return False
        if is_last:
            return True
        every = self.config.eval_every or self.config.eval_every_epochs * self.plan.order.steps_per_epoch
        return every > 0 and step % every == 0

    def is_checkpoint_due(self, step: int) -> bool:
        """Return False for the last step, which is saved separately."""
        every = self.config.checkpoint_every
        return every > 0 and step % every == 0 and step != self.plan.total_steps

    def may_save(self, step: int, *, is_last: bool) -> bool:
        """An evaluation may be the best."""
        return self.is_checkpoint_due(step) or self.is_evaluation_due(step, is_last=is_last)


def create_job(
    workload: Workload,
    config: Config,
    collective: Collective,
    *,
    num_threads: int,
    start: Start = FRESH,
    adapt_model: Callable[[keras.Model], None] = lambda model: None,
    optimizer: Callable[[], keras.optimizers.Optimizer] | None = None,
    in_groups: bool | None = None,
) -> Job:
    """Read data, create model and steps, compare the ranks. Collective.

    ``adapt_model`` changes the model before tracing; ``optimizer`` replaces the workload's and the settings'.
    ``in_groups``: see ``GradientReduction``.
    """
    set_phase(Phase.PREPARE, takes_long=True)
    set_up_keras(config)
    sources, plan, contents = open_data(workload, config, collective, num_threads=num_threads, start=start)
    run_directory = Path(start.path) if start.path else None
    batches = create_batches(
        sources.train,
        plan,
        workload,
        config,
        collective,
        Progress(**start.progress),
        num_threads=num_threads,
        run_directory=run_directory,
    )
    set_phase(Phase.COMPILE, takes_long=True)
    model = raise_on_all_ranks(collective, lambda: create_model(workload), name="model")
    for state in states_of_stateful_layers(model):
        require_same_size(state.path, start.size, collective.world.size)
    adapt_model(model)

    def trace() -> tuple[TrainStep, Evaluation | None]:
        chosen = optimizer() if optimizer else choose_optimizer(workload, config, plan.learning_rate(0))
        spec = batches.element_spec
        step = create_step(workload, config, collective, model, chosen, spec, plan.order, in_groups=in_groups)
        world = collective.world
        require_full_batches(step.row_state, plan.order, rank=world.rank, size=world.size)
        evaluation = create_evaluation(
            workload,
            config,
            step,
            sources.evaluation,
            collective,
            spec,
            global_batch_size=plan.order.global_batch_size,
            num_threads=num_threads,
            run_directory=run_directory,
        )
        return step, evaluation

    step, evaluation = raise_on_all_ranks(collective, trace, name="step")
    warn_of_settings(workload, config, step, is_parallel=collective.world.size > 1)
    job = Job(
        workload=workload,
        config=config,
        collective=collective,
        plan=plan,
        batches=batches,
        step=step,
        evaluation=evaluation,
        # Those in memory are checked now, unless augment() changes them.
        labels_to_check=() if isinstance(sources.train, ArraySource) and not own_augment(workload) else step.labels,
        many_steps=ManySteps(step, batches, has_clock=not config.deterministic),
        times=StepTimes(times_communication=step.times_communication),
        contents=contents,
    )
    require_same_job(job, sources)
    return job


def open_data(
    workload: Workload, config: Config, collective: Collective, *, num_threads: int, start: Start
) -> tuple[Sources, Plan, Contents]:
    """Collective."""
    sources, contents = open_sources(workload, config, collective, start=start)
    local_batch_size = (config.batch_size or DEFAULT_BATCH_SIZE) * config.accumulate
    # The size of the first start, even with another number of ranks.
    global_batch_size = start.global_batch_size or config.global_batch_size or local_batch_size * collective.world.size
    if isinstance(sources.train, Feed) and sources.train.steps_per_epoch is None:
        known = {"seed": config.seed, "global_batch_size": global_batch_size}
        sources = sources._replace(train=with_steps_of_its_own(sources.train, collective, **known))
    return sources, plan_steps(workload, config, sources.train, global_batch_size, first_step=start.step), contents


def require_same_job(job: Job, sources: Sources) -> None:
    """Collective."""
    collective = job.collective
    require_same_code(collective, name="preflight/code of the job")  # with what data and model have imported
    require_alike(collective, describe_job(job), UsageError, OTHER_MODEL, name="preflight/training")
    raise_on_all_ranks(collective, lambda: check_labels(job, sources), name="labels")
    set_phase(Phase.PREPARE, takes_long=True)
    require_same_contents(collective, job.contents)


def describe_job(job: Job) -> dict[str, str | list[str]]:
    """Facts that must be equal on all ranks."""
    spec, order, optimizer = job.batches.element_spec, job.plan.order, job.step.optimizer
    settings = flatten_settings(optimizer.get_config())
    named = job.step.named_variables | job.step.named_row_state
    evaluated = []
    if job.evaluation is not None:
        eval_step = job.evaluation.step
        evaluated = [*eval_step.metric_names, *eval_step.stateful_metrics.facts]
    return {
        "seed": str(order.seed),
        "steps per epoch": str(order.steps_per_epoch),
        "steps": str(job.plan.total_steps),
        "steps done": str(job.plan.first_step),
        "global batch size": str(order.global_batch_size),
        "batch": str(tf.nest.map_structure(lambda part: f"{part.dtype.name} {part.shape}", (spec.x, spec.y))),
        "metric": [*job.step.metric_names, *job.step.stateful_metrics.facts],
        "metric of the evaluation": evaluated,
        "optimizer": type(optimizer).__name__,
        "setting of the optimizer": [f"{name}={plain(value)}" for name, value in settings.items()],
        "variable": [f"{name} {v.dtype} {list(v.shape)}" for name, v in named.items()],
        "setting of the layers": describe_layers(job.step.model),
    }


def check_labels(job: Job, sources: Sources) -> None:
    """Check labels in memory; others are checked when they are read."""
    eval_step = job.evaluation and job.evaluation.step
    for of, source, step in (("training", sources.train, job.step), ("evaluation", sources.evaluation, eval_step)):
        if isinstance(source, ArraySource) and step is not None:
            try:
                for labels in step.labels:
                    labels.check(source.y, range(source.num_samples), of=of)
            except DataError:
                if step is eval_step or keeps_labels(job.workload.augment, source):
                    raise


# Path from data_dir=None: f"{data_dir}/train.npz" or data_dir / "train.npz".
NO_DIRECTORY = re.compile(r"\bNone/|'NoneType' and 'str'|not '?NoneType'?$")


def open_sources(
    workload: Workload, config: Config, collective: Collective, *, start: Start
) -> tuple[Sources, Contents]:
    """Collective.

    Checks number and kind of samples; ``require_same_contents`` checks contents later.
    """
    run_directory = Path(start.path) if start.path else None
    sources = raise_on_all_ranks(collective, lambda: read_sources(workload, config, run_directory), name="sources")
    require_same_sources(collective, sources)
    size = collective.world.size
    former_size = start.size
    has_order_of_ranks = isinstance(sources.train, Feed) and not sources.train.is_shared
    if has_order_of_ranks and former_size not in (None, size):
        raise UsageError(
            f"the run was begun by {former_size} ranks, each fed its own samples, and now there are {size}; what they "
            f"were fed cannot be divided again. Start {former_size} ranks, or start a new run with --resume never."
        )
    return sources, Contents(sources._asdict())


def read_sources(workload: Workload, config: Config, run_directory: Path | None) -> Sources:
    """Raise DataError for samples known to be damaged; their list goes to ``run_directory``."""
    try:
        given = workload.create_sources(config.data_dir, synthetic=config.synthetic)
    except Exception as error:
        if config.data_dir is None and NO_DIRECTORY.search(str(error)):
            raise DataError(
                f"{type(workload).__name__}.create_sources failed: {describe_defect(error).rstrip('.')}. No --data_dir "
                "was given, so that its data_dir is None. Give --data_dir DIR."
            ) from error
        raise
    sources = require_sources(workload, given)
    damaged = [sample for source in sources for sample in getattr(source, "damaged", ())]
    if damaged:
        raise unreadable_error(damaged, run_directory, reach="node")
    return sources


def require_sources(workload: Workload, given: Any) -> Sources:
    name = f"{type(workload).__name__}.create_sources"
    if not isinstance(given, Sources):
        raise UsageError(
            f"{name} gave {name_kind(given)}; it must give ringtrain.Sources(train, evaluation), where evaluation "
            "may be left out."
        )
    for part, source in given._asdict().items():
        steps: Any = source.steps_per_epoch if isinstance(source, Feed) else None
        is_number = isinstance(steps, SupportsIndex) and not isinstance(steps, bool)
        if steps is not None and not (is_number and steps.__index__() >= 1):
            raise DataError(
                f"steps_per_epoch is {steps!r}; it must be a whole number, at least 1, or None for a single pass."
            )
        may_be = (isinstance(source, Feed) and part == "train") or (source is None and part == "evaluation")
        if may_be or (hasattr(source, "gather") and isinstance(getattr(source, "num_samples", None), SupportsIndex)):
            continue
        remedy = "from_arrays(x, y) makes one of arrays"
        if part == "train":
            remedy += "; from_dataset takes a tf.data.Dataset, from_grain samples by number, from_pydataset a PyDataset"
            remedy += "; from_generator and from_callable take batches from code of yours"
        raise UsageError(
            f"{name} gave {name_kind(source)} as {part}; it must be a source, with num_samples and gather"
            f"{', or None' if part == 'evaluation' else ''}: in ringtrain, {remedy}."
        )
    return given


def name_kind(value: Any) -> str:
    kind = type(value)
    if value is None:
        return "None"
    if isinstance(value, Feed):
        return "a feed of batches"
    if isinstance(value, (tuple, list)):
        return f"a {kind.__name__} of {len(value)}"
    package = "" if kind.__module__ == "builtins" else f"{kind.__module__.split('.')[0]} "
    return f"a {package}{kind.__name__}"
