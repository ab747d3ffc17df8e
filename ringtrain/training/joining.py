"""Set up a rank's devices, join the other ranks, and leave them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ringtrain.config import Config
from ringtrain.errors import RingtrainError
from ringtrain.guard.causes import LostRanksError
from ringtrain.guard.failing import describe_same, is_raised_by_rank0
from ringtrain.messages.defects import describe_defect, format_defect
from ringtrain.messages.escaping import escape, escape_block, escape_message
from ringtrain.runtime import shutdown
from ringtrain.runtime.devices import (
    NO_NEEDS,
    DevicePlan,
    Needs,
    adapt_plan,
    apply_plan,
    plan_devices,
    set_environment,
    uses_horovod,
)
from ringtrain.runtime.machine import claim_cores, read_machine
from ringtrain.runtime.run_record import record_end
from ringtrain.runtime.segments import remove_dead_segments
from ringtrain.runtime.world import World
from ringtrain.training.connection import keep_connection, kept_connection
from ringtrain.training.ending import end_values, report_error
from ringtrain.watchdog.thread import Watchdog

if TYPE_CHECKING:
    from ringtrain.collectives import Collective
    from ringtrain.workloads.base import Workload

# For the launcher to end a rank that lost another: the other's error shows the cause.
LAUNCHER_SECONDS = 3.0
INTERRUPTED = 128 + signal.SIGINT


class Prepared(NamedTuple):
    workload: Workload
    config: Config
    plan: DevicePlan
    device: str


def pin(world: World, config: Config | None = None, workload_class: type[Workload] | None = None) -> DevicePlan:
    """Choose devices and cores. Call it before heavy imports."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of libraries; ours are log lines
    return take_devices(world, NO_NEEDS if config is None else needs_of(config, world, workload_class))


def take_devices(world: World, needs: Needs) -> DevicePlan:
    if world.local_rank == 0:
        remove_dead_segments()
    plan = plan_devices(world, read_machine(os.environ), os.environ, needs, claim_cores=claim_cores)
    apply_plan(plan)
    return plan


def adapt(plan: DevicePlan, world: World, config: Config, workload_class: type[Workload]) -> DevicePlan:
    """Adapt the plan to the workload. Call it before TensorFlow, MPI and Horovod start."""
    adapted = adapt_plan(plan, world, os.environ, needs_of(config, world, workload_class))
    set_environment(adapted, before=plan)
    return adapted


def needs_of(config: Config, world: World, workload_class: type[Workload] | None) -> Needs:
    from ringtrain.collectives.native.library import LIBRARY
    from ringtrain.workloads import names_python_functions  # imports NumPy, which the doctor must not need

    sums_natively = config.backend in ("auto", "native") and LIBRARY.exists()
    return Needs(
        deterministic=config.deterministic,
        hang_timeout=config.hang_timeout,
        profiles=config.profile is not None,
        one_at_a_time=sums_natively and not (workload_class and names_python_functions(workload_class)),
        horovod=uses_horovod(config.backend, world.launcher),
    )


@contextlib.contextmanager
def joined(
    prepared: Prepared, world: World, *, command: str, keeps_connection: bool = False
) -> Iterator[tuple[Collective, Watchdog]]:
    """Join the other ranks under a watchdog; leave at once if only this rank failed, as they would wait.

    ``keeps_connection``: for further runs of this process, until the program ends.
    """
    from ringtrain.collectives.connect import connect, require_working_sums, with_native_sums
    from ringtrain.collectives.context import use_collective
    from ringtrain.guard.preflight import require_same_start
    from ringtrain.runtime.devices import own_gpu

    config = prepared.config
    shutdown.allow(config.exit_timeout, f"rank {world.rank} on {world.node}")
    with watched(config, world) as watchdog:
        kept = kept_connection()
        collective = connect(config.backend, world) if kept is None else kept.collective
        try:
            require_same_start(collective, config, command=command, environ=os.environ)
            if kept is None:
                require_working_sums(collective, own_gpu())
                collective = with_native_sums(collective, config.backend)
            else:
                kept.require_backend(config.backend)
            if kept is None and keeps_connection:
                kept = keep_connection(collective, config.backend)
            watchdog.meet(collective)
            with use_collective(collective), shutdown.ending_forked():
                yield collective, watchdog
        except BaseException as error:
            leave_by(error, collective, watchdog)
            if kept is None:
                collective.close()
            else:
                kept.note_end(error.exit_code if isinstance(error, RingtrainError) else 1)
            raise
        watchdog.begin_leaving(0)
        if kept is None:
            collective.close()
        else:
            kept.note_end(0)


def leave_by(error: BaseException, collective: Collective, watchdog: Watchdog, *, is_agreed: bool = True) -> None:
    """Return only if all ranks have the error: otherwise they would wait, and this process ends.

    ``is_agreed``: False if an error that all should have may be only this rank's.
    """
    world = collective.world
    if isinstance(error, RingtrainError):
        watchdog.begin_leaving(error.exit_code, functools.partial(report_error, error, world))
        if isinstance(error, LostRanksError):
            if error.has_lost_rank0:
                watchdog.record_end(error)
            time.sleep(LAUNCHER_SECONDS)
        if error.reach == "run":
            error.is_agreed = is_agreed
            return
        report_error(error, world)
        collective.abort(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        watchdog.begin_leaving(INTERRUPTED)
        if world.is_rank0:
            sys.stderr.write("ringtrain: interrupted (SIGINT).\n")
        collective.abort(INTERRUPTED)
    watchdog.begin_leaving(1)
    message, shown = escape(f"rank {world.rank} on {world.node} failed: {describe_defect(error)}"), ""
    if is_raised_by_rank0(error):
        message = describe_same(error, world)
    else:
        shown = escape_block(format_defect(error))
    record_end(end_values("failed", 1, message))
    sys.stderr.write(f"{shown}ringtrain: error: {message}\n")
    collective.abort(1)


@contextlib.contextmanager
def watched(config: Config, world: World) -> Iterator[Watchdog]:
    """Run a watchdog from before the rank joins until it has left."""
    watchdog = Watchdog(
        world,
        config.hang_timeout,
        report=lambda error: report_error(error, world),
        warn=lambda text: print(escape_message(f"ringtrain: warning: {text}"), file=sys.stderr, flush=True),
    )
    watchdog.start()
    try:
        yield watchdog
    finally:
        watchdog.stop()
