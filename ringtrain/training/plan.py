"""The plan of a run: steps, samples, learning rates, and this rank's batches."""

from __future__ import annotations

import base64
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tensorflow as tf

from ringtrain.collectives import Collective, raise_on_all_ranks
from ringtrain.config import DEFAULT_BATCH_SIZE, MAX_STEPS, Config
from ringtrain.data.batches import ArrayBatches, Batches, PipelineBatches, StreamBatches
from ringtrain.data.order import SampleOrder, StreamingOrder
from ringtrain.data.pipeline import Augment, local_batches
from ringtrain.data.sources import ArraySource, Feed, Source
from ringtrain.data.streaming import streaming_batches
from ringtrain.data.tf_data import NO_STATE
from ringtrain.data.unreadable import explain_unreadable
from ringtrain.errors import UsageError
from ringtrain.messages.log import LOG
from ringtrain.run.resume import Progress
from ringtrain.step.schedule import LearningRate
from ringtrain.workloads.base import Workload

DEFAULT_EPOCHS = 10
LENGTH_REMEDY = (
    "Give --steps (the run ends earlier if no rank has samples left); or steps_per_epoch to from_generator, "
    "from_callable or from_dataset; or, to a tf.data.Dataset whose length you know, "
    "dataset.apply(tf.data.experimental.assert_cardinality(N))."
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Equal on all ranks."""

    order: SampleOrder
    learning_rate: LearningRate  # by samples seen
    first_step: int
    total_steps: int

    @property
    def known_total_steps(self) -> int | None:
        """``total_steps``; None if the data decide."""
        return self.total_steps if self.order.has_known_length else None

    def learning_rate_of(self, step: int) -> float:
        """``step`` is from 1."""
        return self.learning_rate(self.order.samples_before(step - 1))


def plan_steps(
    workload: Workload, config: Config, train: Source | Feed, global_batch_size: int, *, first_step: int = 0
) -> Plan:
    order = plan_order(config, train, global_batch_size)
    if order.has_known_length:
        total_steps = config.steps or (config.epochs or DEFAULT_EPOCHS) * order.steps_per_epoch
    else:
        total_steps = MAX_STEPS
    if total_steps > MAX_STEPS:
        raise UsageError(
            f"{config.epochs or DEFAULT_EPOCHS} epochs of {order.steps_per_epoch} steps are {total_steps:,} steps; "
            f"there may be at most {MAX_STEPS:,}. Give fewer --epochs, or --steps."
        )
    if config.steps_per_call != "auto" and int(config.steps_per_call) > order.steps_per_epoch:
        raise UsageError(
            f"steps_per_call is {config.steps_per_call}; it must be auto, or from 1 to {order.steps_per_epoch}, the "
            "steps of an epoch."
        )
    defaults = workload.defaults
    own_batch_size = defaults.get("global_batch_size") or defaults.get("batch_size", DEFAULT_BATCH_SIZE)
    learning_rate = LearningRate(
        optimizer=config.optimizer,
        batch_ratio=global_batch_size / own_batch_size,
        samples_per_epoch=order.num_samples,
        total_samples=order.samples_before(total_steps),
    )
    return Plan(order=order, learning_rate=learning_rate, first_step=first_step, total_steps=total_steps)


def plan_order(config: Config, train: Source | Feed, global_batch_size: int) -> SampleOrder:
    if not isinstance(train, Feed):
        return SampleOrder(num_samples=train.num_samples, global_batch_size=global_batch_size, seed=config.seed)
    steps_per_epoch = train.steps_per_epoch or config.steps
    has_known_length = steps_per_epoch is not None
    if steps_per_epoch is None:
        require_no_length(config, train)
        steps_per_epoch = MAX_STEPS
    return StreamingOrder(
        num_samples=steps_per_epoch * global_batch_size,
        global_batch_size=global_batch_size,
        seed=config.seed,
        is_single_pass=train.steps_per_epoch is None,
        has_known_length=has_known_length,
        is_shared=train.is_shared,
    )


def require_no_length(config: Config, train: Feed) -> None:
    """Check that a run can be one pass of unknown length; warn if several epochs are wanted.

    Raises:
        UsageError: the pass has no end, or the learning rate depends on the length.
    """
    settings = config.optimizer
    if train.has_no_end:
        why = "the dataset has no end"
    elif settings.schedule != "constant":
        why = f"optimizer.schedule is {settings.schedule}, which needs it"
    elif settings.warmup_epochs:
        why = f"optimizer.warmup_epochs is {settings.warmup_epochs:g}, which needs it"
    else:
        if (config.epochs or 1) > 1:
            LOG.warning(
                f"the number of steps of an epoch is not known, so that training stops after one pass, not after "
                f"{config.epochs}. {LENGTH_REMEDY}"
            )
        return
    raise UsageError(f"the length of the training is not known, and {why}. {LENGTH_REMEDY}")


def create_batches(
    train: Source | Feed,
    plan: Plan,
    workload: Workload,
    config: Config,
    collective: Collective,
    progress: Progress,
    *,
    num_threads: int,
    run_directory: Path | None = None,
) -> Batches:
    """Create this rank's batches. Collective.

    Args:
        progress: before the first step.
        run_directory: for a list of unreadable samples.
    """
    order, world, places = plan.order, collective.world, progress.places
    steps: dict[str, Any] = {"first_step": plan.first_step, "end_step": plan.total_steps}
    read: dict[str, Any] = {"num_threads": num_threads, "augment": own_augment(workload)}
    if isinstance(train, Feed):
        is_known = len(places) == world.size or (bool(places) and train.is_shared)
        step, state, where = places[world.rank if len(places) == world.size else 0] if is_known else (0, "", "")
        # States may name files, which are gone or different in another directory.
        place = (step, base64.b64decode(state)) if state and where == place_of_data(config) else NO_STATE
        streaming_order = cast(StreamingOrder, order)
        dataset, explain, states = streaming_batches(train, streaming_order, collective, **steps, **read, place=place)
        return StreamBatches(
            dataset,
            streaming_order,
            collective,
            **steps,
            explain=explain,
            samples_seen=progress.samples_seen,
            state_before=states.before if states.are_kept else None,
        )

    if type(train) is ArraySource and read["augment"] is None and not tf.config.get_visible_devices("GPU"):
        # To read ahead would take the cores that compute.
        of_arrays = functools.partial(ArrayBatches, train, order, world, **steps)
        return raise_on_all_ranks(collective, of_arrays, name="batches")
    trace = functools.partial(local_batches, train, order, world, **steps, **read)
    dataset = raise_on_all_ranks(collective, trace, name="batches")
    explain = functools.partial(explain_unreadable, train, order, world, run_directory)
    return PipelineBatches(dataset, order, **steps, explain=explain)


def own_augment(workload: Workload) -> Augment | None:
    return None if getattr(workload.augment, "__func__", None) is Workload.augment else workload.augment


def place_of_data(config: Config) -> str:
    """Marks this rank's pipeline state in a checkpoint."""
    return "" if config.data_dir is None else os.path.realpath(config.data_dir)
