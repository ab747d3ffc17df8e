"""What the ranks of one command do together, once they have joined: train a run, or evaluate one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringtrain.config import Config
from ringtrain.errors import PreemptedError, RingtrainError, UsageError
from ringtrain.guard.lost import LostRanksError, explaining_lost_ranks
from ringtrain.guard.memory import explaining_memory
from ringtrain.messages.defects import describe_defect, format_defect
from ringtrain.messages.escaping import escape, escape_block, escape_message
from ringtrain.run.directory import REPORT_FILE
from ringtrain.run.lease import LeaseLostError
from ringtrain.runtime import activity, leaving, streams
from ringtrain.runtime.activity import Phase
from ringtrain.runtime.cores import claim_cores
from ringtrain.runtime.devices import DevicePlan, adapt_plan, apply_plan, plan_devices, set_environment
from ringtrain.runtime.launched import tell_end, tell_run
from ringtrain.runtime.machine import read_machine
from ringtrain.runtime.stopping import StopRequests
from ringtrain.runtime.time_limit import find_limits
from ringtrain.runtime.world import World
from ringtrain.terminal.startup import describe_start
from ringtrain.watchdog.thread import Watchdog

if TYPE_CHECKING:
    from ringtrain.collectives import Collective
    from ringtrain.run.directory import RunDirectory
    from ringtrain.run.resume import OpenedRun, Start
    from ringtrain.terminal.console import Console
    from ringtrain.training.loop import Result
    from ringtrain.workloads.base import Workload

# Time for rank 0 to say an error that it has as well, and for the launcher to end the other ranks then; on a busy node
# ranks start seconds apart.
FIRST_RANK_SECONDS = 15.0
# For the launcher to end a rank that has lost another, before it adds an error to the one that tells why.
LAUNCHER_SECONDS = 3.0


class Prepared(NamedTuple):
    """A rank that knows what to train and has its devices, before it joins the others."""

    workload: Workload
    config: Config
    plan: DevicePlan
    device: str


def pin(world: World, config: Config | None = None, workload_class: type[Workload] | None = None) -> DevicePlan:
    """Take this rank's share of its node, before anything heavy is imported; for a run with this configuration."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # the libraries'; ours reach the user as lines of the log
    needs = {} if config is None else needs_of(config, workload_class)
    plan = plan_devices(world, read_machine(os.environ), os.environ, claim_cores=claim_cores, **needs)
    apply_plan(plan)
    return plan


def adapt(plan: DevicePlan, world: World, config: Config, workload_class: type[Workload]) -> DevicePlan:
    """The plan with what the workload asks for, once it is imported: before TensorFlow, MPI and Horovod start."""
    adapted = adapt_plan(plan, world, os.environ, **needs_of(config, workload_class))
    set_environment(adapted, before=plan)
    return adapted


def needs_of(config: Config, workload_class: type[Workload] | None) -> dict[str, Any]:
    """What a run asks of a rank's devices, as arguments of ``plan_devices``; as far as it is known."""
    from ringtrain.workloads import names_python_functions  # here: it loads NumPy, which the doctor has to do without

    sums_through_memory = config.backend == "auto" and config.compression == "none"
    return {
        "deterministic": config.deterministic,
        "hang_timeout": config.hang_timeout,
        "profiles": config.profile is not None,
        "one_at_a_time": sums_through_memory and not (workload_class and names_python_functions(workload_class)),
    }


@contextlib.contextmanager
def joined(prepared: Prepared, world: World, *, command: str) -> Iterator[tuple[Collective, Watchdog]]:
    """Join the other ranks, which must have been started alike, under the eyes of a watchdog.

    At the end leave them in good order; at once where this rank failed alone, as they would wait for it.
    """
    from ringtrain.collectives import connect, share_memory
    from ringtrain.collectives.checks import require_working_sums
    from ringtrain.guard.preflight import require_same_start
    from ringtrain.runtime.devices import own_gpu

    config = prepared.config
    with watched(config, world) as watchdog:
        collective = connect(config.backend, world)
        try:
            require_same_start(collective, config, command=command, environ=os.environ)
            require_working_sums(collective, own_gpu())
            if config.backend == "auto":
                collective = share_memory(collective)
            watchdog.meet(collective)
            yield collective, watchdog
        except RingtrainError as error:
            watchdog.begin_leaving(error.exit_code, functools.partial(report_error, error, world))
            if isinstance(error, LostRanksError):
                time.sleep(LAUNCHER_SECONDS)
            if error.reach == "run":
                error.is_agreed = True
                collective.close()
                raise
            report_error(error, world)
            collective.abort(error.exit_code)
        except BaseException as error:
            watchdog.begin_leaving(1)
            message = escape(f"rank {world.rank} on {world.node} failed: {describe_defect(error)}")
            tell_end(end_values("failed", 1, message))
            sys.stderr.write(f"{escape_block(format_defect(error))}ringtrain: error: {message}\n")
            collective.abort(1)
        else:
            watchdog.begin_leaving(0)
            collective.close()


@contextlib.contextmanager
def watched(config: Config, world: World) -> Iterator[Watchdog]:
    """The watchdog of a rank, from before it joins the others until it has left them."""
    leaving.allow(config.exit_timeout, f"rank {world.rank} on {world.node}")
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


def train_together(
    prepared: Prepared, collective: Collective, requests: StopRequests, watchdog: Watchdog
) -> Result | None:
    """Train with the other ranks, from the start-up table to the last line; None where the run was complete already."""
    from ringtrain.terminal.console import open_console
    from ringtrain.training.loop import train

    if collective.world.launcher != "no launcher" and not prepared.config.detached:
        requests.watch_launcher()
    console = open_console(is_rank0=collective.world.is_rank0)
    for line in describe_start(collective, prepared.plan, prepared.device):
        console.line(line)
    start, opened = open_together(prepared.config, collective, requests, console)
    run = opened.directory if opened else None
    watchdog.write_by(
        write_end=functools.partial(write_end_at_hang, run, start),
        warn=functools.partial(write_warning, run, console) if run else None,
    )
    with recording_end(run, start.is_complete, requests, collective.world, console):
        if start.is_complete:
            console.line(
                f"the run in {start.path} is complete: {start.step} steps. --resume never starts anew beside it."
            )
            return None
        with leaving.ending_forked(), explaining_lost_ranks(), explaining_memory(prepared.config):
            result = train(
                prepared.workload,
                prepared.config,
                collective,
                start=start,
                opened=opened,
                requests=requests,
                console=console,
                num_threads=prepared.plan.intra_op_threads,
            )
    for line in describe_result(result, start.path, prepared.config):
        console.line(line)
    return result


def open_together(
    config: Config, collective: Collective, requests: StopRequests, console: Console
) -> tuple[Start, OpenedRun | None]:
    """Open the run directory on rank 0, and tell every rank where the run begins. Every rank must call it."""
    from ringtrain.collectives import run_on_rank0
    from ringtrain.run.resume import Start, open_run

    opened: list[OpenedRun] = []  # on rank 0

    def open_on_rank0() -> dict[str, Any]:
        opened.append(open_run(config, print_line=console.line))
        start = opened[0].start
        tell_run(Path(start.path), step=start.step, is_complete=start.is_complete)
        requests.watch_time(find_limits(config.max_hours, os.environ))
        return dataclasses.asdict(start)

    activity.note(Phase.OPEN, takes_long=True)
    start = Start(**run_on_rank0(collective, open_on_rank0, name="run_directory"))
    return start, opened[0] if opened else None


def describe_result(result: Result, path: str, config: Config) -> list[str]:
    """The last lines of a run: what came of it, where it is, and what to do with it."""
    from ringtrain.training.actions import Ending
    from ringtrain.workloads import BUILT_IN

    early = " (stopped early: no better evaluation for a while)" if result.ending is Ending.EARLY else ""
    metrics = result.evaluation.metrics if result.evaluation else {}
    last = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    said = [f"{last} after the last step"] if last else []
    if result.best is not None:
        said.append(f"best {config.best_metric} {result.best:.4g} at step {result.best_step}")
    quoted = shlex.quote(f"./{path}" if path.startswith("-") else path)  # else it would be read as a flag
    code = "" if config.workload in BUILT_IN else f" --workload {shlex.quote(config.workload)}"
    evaluate = [f"  evaluate the best:  python -m ringtrain eval {quoted}{code}"] if result.evaluation else []
    report = [f"  see its curves:     {quoted}/{REPORT_FILE}"] if (Path(path) / REPORT_FILE).is_file() else []
    done = ": ".join([f"done{early}", *([", ".join(said)] if said else [])])
    return [done, f"  the run is in:      {quoted}", *evaluate, *report]


@contextlib.contextmanager
def recording_end(
    run: RunDirectory | None, is_complete: bool, requests: StopRequests, world: World, console: Console
) -> Iterator[None]:
    """Write the ``end`` record of a run on rank 0, however it ends, then its report, and let go of its directory."""
    if run is None:
        yield
        return
    if is_complete:
        yield
        run.close()
        return

    def leave_early(reason: str, exit_code: int) -> None:
        error = early_end(reason, exit_code)
        report_error(error, world)
        write_end(run, end_of(error))

    streams.warn_by(lambda text: run.write_event("warning", step=activity.current()[0].step, message=text))
    requests.watch_file(run.path)
    requests.at_early_end(leave_early)
    report = functools.partial(report_run, run, console)

    def end(values: Mapping[str, Any], then: Callable[[], None] = lambda: None) -> None:
        requests.at_early_end(lambda reason, exit_code: None)  # one last record is enough
        write_end(run, values, then=then)

    try:
        yield
    except RingtrainError as error:
        end(end_of(error))
        report_error(error, world)  # the other ranks leave now, and then the launcher may end this one at any moment
        report()
        raise
    except BaseException as error:
        end(end_values("failed", 1, describe_defect(error)), then=report)
        raise
    else:
        end(end_values("completed", 0), then=report)


def early_end(reason: str, exit_code: int) -> RingtrainError:
    """Why a process ends before all ranks have saved together."""
    kind = PreemptedError if exit_code == PreemptedError.exit_code else RingtrainError
    return kind(f"stopped by {reason}.", reach="run")


def write_end(run: RunDirectory, end: Mapping[str, Any], *, then: Callable[[], None] = lambda: None) -> None:
    """The last record of a process; none where another process has taken over the directory.

    Args:
        then: what else is done before the directory is let go of.
    """
    tell_end(end)
    with contextlib.suppress(RingtrainError):
        run.write_event(**end)
        then()
    run.close()


def report_run(run: RunDirectory, console: Console) -> None:
    """Write a run's report, whatever its end. A report that fails is a warning: the run is what it is without it."""
    try:
        from ringtrain.report import write_report

        write_report([run.path], run.path / REPORT_FILE, may_write=run.may_write)
    except LeaseLostError:
        return  # it is another process's to write
    except Exception as error:
        console.line(f"warning: {REPORT_FILE} was not written: {describe_defect(error)}")


def write_warning(run: RunDirectory, console: Console, message: str) -> None:
    """Tell the user that something is odd, and keep it with the run."""
    console.line(f"warning: {message}")
    run.write_event("warning", step=activity.current()[0].step, message=message)


def write_end_at_hang(run: RunDirectory | None, start: Start, error: RingtrainError) -> None:
    """The last record of a run that hangs: by rank 0, or in its stead by the first rank that takes its lease."""
    if run is not None:
        write_end(run, end_of(error))
        return
    from ringtrain.run.directory import append_event
    from ringtrain.run.lease import take_over

    path = Path(start.path)
    with contextlib.suppress(OSError):  # not to be seen from this host
        if not start.is_complete and take_over(path, start.fence, environ=os.environ):
            tell_end(end_of(error))
            append_event(path, **end_of(error))


def end_values(status: str, exit_code: int, message: str | None = None) -> dict[str, Any]:
    """An ``end`` event."""
    return {
        "event": "end", "status": status, "exit_code": exit_code, **({"message": message} if message else {})
    }  # fmt: skip


def end_of(error: RingtrainError) -> dict[str, Any]:
    """The ``end`` event of a run that an error ends."""
    values = end_values(error.status(), error.exit_code, str(error))
    return values | ({"stopped_by": error.stopped_by} if isinstance(error, PreemptedError) else {})


def evaluate_together(prepared: Prepared, collective: Collective, run: Path, which: str) -> None:
    """Evaluate a run's checkpoint with the other ranks, and print the result."""
    from ringtrain.collectives import run_on_rank0
    from ringtrain.run.checkpoint import read_checkpoint
    from ringtrain.run.identity import require_own
    from ringtrain.run.store import find_checkpoint
    from ringtrain.run.variables import broadcast_variables
    from ringtrain.terminal.console import open_console
    from ringtrain.training.job import create_job
    from ringtrain.training.saving import restore

    def restore_on_rank0() -> int:
        checkpoint = read_checkpoint(require_own(run, find_checkpoint(run, which)))
        restore(job, checkpoint)
        return checkpoint.step

    with explaining_lost_ranks(), explaining_memory(prepared.config):
        job = create_job(prepared.workload, prepared.config, collective, num_threads=prepared.plan.intra_op_threads)
        activity.note(Phase.RESTORE, takes_long=True)
        step = run_on_rank0(collective, restore_on_rank0, name="restore")
        broadcast_variables(job.step.variables, collective)
        report = job.evaluate()
    if report is None:
        raise UsageError(f"{prepared.config.workload!r} has nothing to evaluate on.", reach="run")
    values = "".join(f", {name} = {value:.4f}" for name, value in report.metrics.items())
    console = open_console(is_rank0=collective.world.is_rank0)
    console.line(f"{run}, step {step} ({which}): eval loss = {report.loss:.4g}{values} ({report.samples} samples)")


def report_end(error: RingtrainError, world: World) -> None:
    """Print, once, why this command ends.

    What every rank should have found wrong before they met, such as a setting, may be this rank's alone, where it was
    started in another way. Where rank 0 has it as well, the launcher ends this process while it waits here.
    """
    if error.reach == "run" and not error.is_agreed and not world.is_rank0:
        time.sleep(FIRST_RANK_SECONDS)
        error.reach = "rank"
    report_error(error, world)


def report_error(error: RingtrainError, world: World) -> None:
    """Print why a run ends, once, however many processes raise it: in one piece."""
    if error.is_told:
        return
    error.is_told = True
    speaks = {"run": world.is_rank0, "node": world.local_rank == 0, "rank": True}[error.reach]
    if speaks:
        where = f"rank {world.rank} on {world.node}: " if world.size > 1 and error.reach != "run" else ""
        message = escape_message(f"{where}{error}")
        tell_end({**end_of(error), "message": message})
        sys.stdout.flush()
        kind = "" if isinstance(error, PreemptedError) else "error: "
        sys.stderr.write(f"ringtrain: {kind}{message}\n")
        sys.stderr.flush()
