"""The end of a run: last lines, ``end`` record and report."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain.errors import HangError, PreemptedError, RingtrainError
from ringtrain.messages.defects import describe_defect
from ringtrain.messages.escaping import escape_message
from ringtrain.runtime import activity, stdio
from ringtrain.runtime.run_record import record_end
from ringtrain.runtime.stopping import StopRequests
from ringtrain.runtime.world import World

if TYPE_CHECKING:
    from ringtrain.run.directory import RunDirectory
    from ringtrain.run.resume import Start
    from ringtrain.terminal.console import Console

# For rank 0 to report the same error, and the launcher to end the others; ranks may start seconds apart.
FIRST_RANK_SECONDS = 15.0


@contextlib.contextmanager
def recording_end(
    run: RunDirectory | None, is_complete: bool, requests: StopRequests, world: World, console: Console
) -> Iterator[None]:
    """On rank 0, write the ``end`` record and report, and release the directory."""
    if run is None or is_complete:
        yield
        if run is not None:
            run.close()
        return

    def leave_early(reason: str, exit_code: int) -> None:
        error = early_end(reason, exit_code)
        report_error(error, world)
        write_end(run, end_of(error))

    stdio.warn_by(lambda text: run.write_event("warning", step=activity.current()[0].step, message=text))
    requests.watch_file(run.path)
    requests.at_early_end(leave_early)
    report = functools.partial(report_run, run, console)

    def end(values: Mapping[str, Any], then: Callable[[], None] = lambda: None) -> None:
        requests.at_early_end(lambda reason, exit_code: None)
        write_end(run, values, then=then)

    try:
        yield
    except RingtrainError as error:
        end(end_of(error))
        report_error(error, world)  # other ranks exit now; the launcher may then end this one
        report()
        raise
    except BaseException as error:
        end(end_values("failed", 1, describe_defect(error)), then=report)
        raise
    else:
        end(end_values("completed", 0), then=report)


def early_end(reason: str, exit_code: int) -> RingtrainError:
    kind = PreemptedError if exit_code == PreemptedError.exit_code else RingtrainError
    return kind(f"stopped by {reason}.", reach="run")


def write_end(run: RunDirectory, end: Mapping[str, Any], *, then: Callable[[], None] = lambda: None) -> None:
    """Write the last record, call ``then``, release the directory. No record if another process has taken over."""
    record_end(end)
    with contextlib.suppress(RingtrainError):
        run.write_event(**run.at_end, **end)
        then()
    run.close()


def report_run(run: RunDirectory, console: Console) -> None:
    """Write the report. A failure only logs a warning."""
    from ringtrain.run.directory import REPORT_FILE  # imports NumPy, which help and errors do not need
    from ringtrain.run.lease import LeaseLostError

    try:
        from ringtrain.report import write_report

        write_report([run.path], run.path / REPORT_FILE, may_write=run.may_write)
    except LeaseLostError:
        return
    except Exception as error:
        console.line(f"warning: {REPORT_FILE} was not written: {describe_defect(error)}")


def write_warning(run: RunDirectory, console: Console, message: str) -> None:
    console.line(f"warning: {message}")
    run.write_event("warning", step=activity.current()[0].step, message=message)


def write_end_at_hang(run: RunDirectory | None, start: Start, error: RingtrainError) -> None:
    """Write the record on rank 0, or on the first rank that takes over its lease."""
    if run is not None:
        write_end(run, end_of(error))
        return
    from ringtrain.run.directory import append_event
    from ringtrain.run.lease import take_over

    path = Path(start.path)
    with contextlib.suppress(OSError):  # not visible from this host
        if not start.is_complete and take_over(path, start.fence, environ=os.environ):
            record_end(end_of(error))
            append_event(path, **end_of(error))


def end_values(status: str, exit_code: int, message: str | None = None) -> dict[str, Any]:
    return {
        "event": "end", "status": status, "exit_code": exit_code, **({"message": message} if message else {})
    }  # fmt: skip


def end_of(error: RingtrainError) -> dict[str, Any]:
    values = end_values(error.status(), error.exit_code, str(error))
    if isinstance(error, HangError) and error.stacks:
        values["stacks"] = error.stacks
    return values | ({"stopped_by": error.stopped_by} if isinstance(error, PreemptedError) else {})


def report_end(error: RingtrainError, world: World) -> None:
    """Report why this command ends.

    An error before the ranks have joined may be only this rank's. If rank 0 has it, the launcher ends this process
    during the wait.
    """
    if error.reach == "run" and not error.is_agreed and not world.is_rank0:
        time.sleep(FIRST_RANK_SECONDS)
        error.reach = "rank"
    report_error(error, world)


def report_error(error: RingtrainError, world: World) -> None:
    """Print an error once, in one write."""
    if error.is_told:
        return
    error.is_told = True
    speaks = {"run": world.is_rank0, "node": world.local_rank == 0, "rank": True}[error.reach]
    if speaks:
        where = f"rank {world.rank} on {world.node}: " if world.size > 1 and error.reach != "run" else ""
        message = escape_message(f"{where}{error}")
        record_end({**end_of(error), "message": message})
        sys.stdout.flush()
        kind = "" if isinstance(error, PreemptedError) else "error: "
        sys.stderr.write(f"ringtrain: {kind}{message}\n")
        sys.stderr.flush()
