"""``python -m launch local``: a group of ranks on this machine, restarted after a crash."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ringtrain.errors import UsageError
from ringtrain.runtime.run_record import DIRECTORY_VARIABLE, SUPERVISOR_VARIABLE, clear, read_end, read_run
from ringtrain.runtime.segments import remove_dead_segments

from . import PACKAGE, PROGRAM
from .arguments import Parser, is_script, plan_program, require_script
from .decision import Attempt, decide, explain
from .family import run_guarded
from .group import Group, Requests
from .lines import print_line
from .slurm.after import begins_anew

Controller = Literal["mpi", "gloo"]
MAX_NUMBER = 10_000  # of ranks on one machine
LAUNCHERS = {  # by controller: program and remedy
    "mpi": ("mpirun", "Install Open MPI, or give --controller gloo"),
    "gloo": ("horovodrun", "It comes with Horovod: activate the environment that ringtrain is installed in"),
}

DESCRIPTION = """\
Train on this machine, by ringtrain's flags or a script of yours: each rank's
lines are labelled and never broken (but on a terminal, which has rank 0's
progress bar), all stop at the first failure, and the first rank's error is
printed last. Ctrl-C lets the ranks save before they leave; the same command
resumes from there.
"""
EXAMPLES = f"""\
examples:
  {PROGRAM} local -np 2 -- --workload digits
  {PROGRAM} local -np 4 --max_restarts 3 -- --epochs 50
  {PROGRAM} local -np 2 -- eval runs/digits
  {PROGRAM} local -np 2 -- my_fit.py --my_flag 1
"""


def main(arguments: Sequence[str]) -> int:
    options, flags = parse(arguments)
    program, remedy = LAUNCHERS[options.controller]
    if shutil.which(program) is None:
        raise UsageError(f"{program} is not on PATH, and controller {options.controller!r} needs it. {remedy}.")
    with tempfile.TemporaryDirectory(prefix="ringtrain-launch-") as directory:
        os.environ[DIRECTORY_VARIABLE], os.environ[SUPERVISOR_VARIABLE] = directory, str(os.getpid())
        return run_guarded(
            lambda: supervise(options.np, options.controller, options.max_restarts, flags, listener=Path(directory))
        )


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        f"{PROGRAM} local",
        usage="%(prog)s -np N [OPTIONS] -- FLAGS | SCRIPT.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("-np", type=int, required=True, metavar="N", help="ranks to start, one for each GPU")
    parser.add_argument(
        "--max_restarts",
        type=int,
        default=0,
        metavar="K",
        help="start the group again after a crash, from the newest checkpoint, at most K times (default: 0)",
    )
    parser.add_argument(
        "--controller",
        choices=list(LAUNCHERS),
        default="mpi",
        help="mpi: mpirun; gloo: horovodrun --gloo (default: mpi)",
    )
    options, flags = parser.parse(arguments)
    require_script(flags)
    for name, value, least in (("-np", options.np, 1), ("max_restarts", options.max_restarts, 0)):
        if not least <= value <= MAX_NUMBER:
            raise UsageError(f"{name} is {value}; it must be from {least} to {MAX_NUMBER:,}.")
    return options, flags


def supervise(
    num_ranks: int, controller: Controller, max_restarts: int, flags: Sequence[str], *, listener: Path
) -> int:
    requests = Requests()
    run: Path | None = None
    num_restarts = last_step = 0
    while True:
        command = plan_group(
            num_ranks,
            controller,
            plan_restart(flags, run, here=Path.cwd()),
            listener=listener,
            python=sys.executable,
            is_root=os.geteuid() == 0,
        )
        attempt = start(command, listener, num_ranks, requests, last_step=last_step)
        run, last_step = attempt.run or run, attempt.last_step
        # It would start a second run.
        allowed = 0 if is_script(flags) and begins_anew(read_run(listener)) else max_restarts
        restarts, reason = decide(attempt, num_restarts=num_restarts, max_restarts=allowed)
        print_line(*explain(attempt), *([reason] if reason else []))
        if not restarts:
            return attempt.exit_code
        num_restarts += 1


def plan_group(
    num_ranks: int, controller: Controller, flags: Sequence[str], *, listener: Path, python: str, is_root: bool
) -> list[str]:
    """Return the launcher's argv.

    Slots are explicit: mpirun refuses more ranks than cores, and distributes them over a batch job's nodes. Ranks pin
    their own cores.
    """
    hosts = f"localhost:{num_ranks}"
    rank = [python, "-m", f"{PACKAGE}.rank", str(listener), python, *plan_program(flags)]
    if controller == "gloo":
        return [python, "-m", f"{PACKAGE}.gloo", "horovodrun", "--gloo", "-np", str(num_ranks), "-H", hosts, *rank]
    as_root = ["--allow-run-as-root"] if is_root else []
    return ["mpirun", *as_root, "-np", str(num_ranks), "--host", hosts, "--map-by", "slot", "--bind-to", "none", *rank]


def plan_restart(flags: Sequence[str], run: Path | None, *, here: Path) -> list[str]:
    """Add the run directory: ``--resume never`` would open a new one."""
    if run is None or is_script(flags):
        return list(flags)
    out = run.relative_to(here) if run.is_relative_to(here) else run  # shorter in messages
    return [*flags, "--out", str(out), "--resume", "auto"]


def start(command: Sequence[str], listener: Path, num_ranks: int, requests: Requests, *, last_step: int) -> Attempt:
    from ringtrain.run.store import list_steps  # not earlier: NumPy's threads take signals before the guard's fork

    clear(listener)
    try:
        group = Group(command, listener, num_ranks, requests).run()
    finally:
        remove_dead_segments()  # of killed ranks
    told = read_run(listener)
    first_step = told.step if told else last_step
    return Attempt(
        group=group,
        end=read_end(listener),
        run=told.path if told else None,
        first_step=first_step,
        last_step=max(list_steps(told.path / "checkpoints") if told else [], default=first_step),
        signals=tuple(requests.signals),
        is_cut_short=requests.is_end_wanted,
    )
