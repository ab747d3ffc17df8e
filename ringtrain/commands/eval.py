"""Evaluate a checkpoint of a run, with any number of processes.

It prints the loss and the metrics over the whole evaluation set.

    python -m ringtrain eval runs/digits
    horovodrun -np 2 python -m ringtrain eval runs/digits --checkpoint newest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import RunOptions, prepare, read_settings
from ringtrain.errors import UsageError
from ringtrain.guard.causes import explaining_lost_ranks, explaining_memory
from ringtrain.runtime.activity import Phase, set_phase
from ringtrain.runtime.world import World
from ringtrain.training.joining import joined


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    hang_timeout: float | None = None
    """seconds after which what hangs is ended (the run's)"""


def main(arguments: Sequence[str], world: World) -> int:
    options = Options(**parse_arguments(Options, arguments, world))
    explicit = read_settings("eval", options, arguments, world)
    if options.hang_timeout is not None:
        explicit["hang_timeout"] = options.hang_timeout
    prepared = prepare(explicit, world)
    from ringtrain.collectives import run_on_rank0
    from ringtrain.run.checkpoint import read_checkpoint
    from ringtrain.run.directory import require_own
    from ringtrain.run.store import find_checkpoint
    from ringtrain.terminal.console import open_console
    from ringtrain.training.job import create_job
    from ringtrain.training.saving import restore

    def restore_on_rank0() -> int:
        checkpoint = read_checkpoint(require_own(options.run, find_checkpoint(options.run, options.checkpoint)))
        restore(job, checkpoint)
        return checkpoint.step

    with (
        joined(prepared, world, command="eval") as (collective, _),
        explaining_lost_ranks(),
        explaining_memory(prepared.config),
    ):
        job = create_job(prepared.workload, prepared.config, collective, num_threads=prepared.plan.intra_op_threads)
        set_phase(Phase.RESTORE, takes_long=True)
        step = run_on_rank0(collective, restore_on_rank0, name="restore")
        job.step.share_values(collective)
        report = job.evaluate()
        if report is None:
            raise UsageError(f"{prepared.config.workload!r} has nothing to evaluate on.")
        values = "".join(f", {name} = {value:.4f}" for name, value in report.metrics.items())
        where = f"{options.run}, step {step} ({options.checkpoint})"
        console = open_console(is_rank0=world.is_rank0)
        console.line(f"{where}: eval loss = {report.loss:.4g}{values} ({report.samples} samples)")
    return 0
