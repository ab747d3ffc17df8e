"""A training run after the ranks have joined."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain.collectives import Collective, run_on_rank0
from ringtrain.config import Config, trackers_of
from ringtrain.guard.causes import explaining_lost_ranks, explaining_memory
from ringtrain.messages.log import show_log
from ringtrain.run.directory import REPORT_FILE
from ringtrain.run.resume import OpenedRun, Start, open_run
from ringtrain.runtime import shutdown
from ringtrain.runtime.activity import Phase, set_phase
from ringtrain.runtime.run_record import record_start
from ringtrain.runtime.stopping import StopRequests
from ringtrain.runtime.time_limit import find_limits
from ringtrain.runtime.world import World, read_world
from ringtrain.terminal.console import open_console
from ringtrain.terminal.startup import describe_start
from ringtrain.tracking.base import require_installed, require_store
from ringtrain.tracking.follower import following
from ringtrain.training.ending import early_end, recording_end, report_error, write_end_at_hang, write_warning
from ringtrain.training.joining import Prepared, joined
from ringtrain.watchdog.thread import Watchdog
from ringtrain.workloads import BUILT_IN

if TYPE_CHECKING:
    from ringtrain.training.loop import Result
    from ringtrain.training.session import RunSession


def prepare_and_train(
    prepare: Callable[[], Prepared], world: World, *, keeps_connection: bool = False
) -> Result | None:
    """Prepare, join, open the run directory and train; handle requests to stop throughout.

    ``keeps_connection``: for further runs of this process.
    """
    with StopRequests() as requests:
        requests.at_early_end(lambda reason, exit_code: report_error(early_end(reason, exit_code), world))
        prepared = prepare()
        if world.launcher != "no launcher" and not prepared.config.detached:
            requests.watch_launcher(is_joining=True)
        joins = joined(prepared, world, command="train", keeps_connection=keeps_connection)
        with joins as (collective, watchdog):
            from ringtrain.training.loop import train

            lines = describe_start(collective, prepared.plan, prepared.device)
            with opened_together(prepared.config, collective, requests, watchdog, lines) as session:
                start, line = session.start, session.console.line
                if start.is_complete:
                    line(f"the run in {start.name} is complete: {start.step} steps. Use --resume never for a new run.")
                    return None
                with explaining_memory(prepared.config):
                    result = train(prepared, session)
            for text in describe_result(result, start, prepared.config):
                line(text)
            return result


@contextlib.contextmanager
def opened_together(
    config: Config, collective: Collective, requests: StopRequests, watchdog: Watchdog, lines: Sequence[str] = ()
) -> Iterator[RunSession]:
    """Open the run directory on rank 0, after ``lines``; record the end. Collective."""
    from ringtrain.training.session import RunSession

    if read_world(os.environ).launcher != "no launcher" and not config.detached:
        requests.watch_launcher()
    console = open_console(is_rank0=collective.world.is_rank0)
    for line in lines:
        console.line(line)
    opened: list[OpenedRun] = []
    trackers = trackers_of(config.tracker)
    senders = [*trackers, *([config.copy_to] if config.copy_to else [])]

    def open_on_rank0() -> dict[str, Any]:
        require_installed(trackers)
        require_store(config.copy_to)
        opened.append(open_run(config, check_path=functools.partial(check_copy, config)))
        start = opened[0].start
        record_start(Path(start.path), step=start.step, is_complete=start.is_complete)
        requests.watch_time(find_limits(config.max_hours, os.environ))
        return dataclasses.asdict(start)

    with show_log(console.line):
        set_phase(Phase.OPEN, takes_long=True)
        start = Start(**run_on_rank0(collective, open_on_rank0, name="run_directory"))
        run = opened[0] if collective.world.is_rank0 else None
        directory = run.directory if run else None
        watchdog.write_by(
            write_end=functools.partial(write_end_at_hang, directory, start),
            warn=functools.partial(write_warning, directory, console) if directory else None,
        )
        to_follow = [] if start.is_complete else senders
        with (
            following(directory.path, to_follow, console.line) if directory else contextlib.nullcontext(),
            recording_end(directory, start.is_complete, requests, collective.world, console),
            contextlib.closing(
                RunSession(config, collective, start=start, opened=run, requests=requests, console=console)
            ) as session,
            shutdown.ending_forked(),
            explaining_lost_ranks(),
        ):
            yield session


def check_copy(config: Config, path: Path) -> None:
    """Raise UsageError if ``--copy_to`` cannot hold a copy of the run in this directory."""
    if config.copy_to is not None:
        from ringtrain.tracking.copying import refuse_copy  # needs fsspec

        refuse_copy(path, config.copy_to)


def describe_result(result: Result, start: Start, config: Config) -> list[str]:
    from ringtrain.training.actions import Ending

    early = " (stopped early: no better evaluation for a while)" if result.ending is Ending.EARLY else ""
    metrics = result.evaluation.metrics if result.evaluation else {}
    last = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    said = [f"{last} after the last step"] if last else []
    if result.best is not None:
        said.append(f"best {config.best_metric} {result.best:.4g} at step {result.best_step}")
    name = start.name
    quoted = shlex.quote(f"./{name}" if name.startswith("-") else name)  # else parsed as a flag
    code = "" if config.workload in BUILT_IN else f" --workload {shlex.quote(config.workload)}"
    evaluate = [f"  evaluate the best:  python -m ringtrain eval {quoted}{code}"] if result.evaluation else []
    report = [f"  see its curves:     {quoted}/{REPORT_FILE}"] if (Path(start.path) / REPORT_FILE).is_file() else []
    done = ": ".join([f"done{early}", *([", ".join(said)] if said else [])])
    return [done, f"  the run is in:      {quoted}", *evaluate, *report]
