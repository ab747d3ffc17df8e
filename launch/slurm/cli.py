"""``python -m launch slurm``: write a batch script, submit it, and what its last line calls."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from ringtrain.errors import RingtrainError, UsageError
from ringtrain.files.atomic import replacing
from ringtrain.files.outputs import require_same_kind
from ringtrain.messages.defects import explaining_import
from ringtrain.messages.escaping import escape
from ringtrain.runtime.srun import find_mpi
from ringtrain.runtime.stdio import has_lost_stdout

from .. import PROGRAM
from ..arguments import Parser, is_script, require_command, require_script, run_command
from ..lines import print_line
from .array import read_members
from .controller import find_max_array_size
from .controller import submit as submit_script
from .job import JobRequest, read_flag

WHAT = "FLAGS are ringtrain's,\nor a script of yours and its arguments."
HELP = f"""\
usage: {PROGRAM} slurm COMMAND [OPTIONS] -- FLAGS

commands:
  render   print a batch script for sbatch, or write it with --to
  submit   the same script, given to sbatch
  status   show runs: state, step, loss, time left, last error
  after    what the last line of such a script calls

examples:
  {PROGRAM} slurm render --nodes 2 --gpus_per_node 4 \\
      --time 12:00:00 -- --workload inception --data_dir images
  {PROGRAM} slurm submit --nodes 1 --ranks_per_node 16 \\
      --time 2:00:00 --venv .venv -- --workload digits
  {PROGRAM} slurm submit --nodes 1 --gpus_per_node 4 \\
      --array "optimizer.lr=0.1,0.01 seed=1..5" --array_limit 4

Each command's options: {PROGRAM} slurm COMMAND --help
"""
MANY = "may be given several times"
OPTIONS = {each.name: each for each in fields(JobRequest) if each.metadata}
TRAIN_HELP = "python -m ringtrain train --help"


def main(arguments: Sequence[str]) -> int:
    return run_command(arguments, COMMANDS, HELP, of="slurm ")


def render(arguments: Sequence[str]) -> int:
    from .script import render as render_script  # so that help needs no Jinja2

    parser = create_request_parser("render", f"Print a batch script for sbatch. {WHAT}")
    parser.add_argument("--to", type=Path, metavar="FILE", help="write it there instead")
    options, flags = parser.parse(arguments)
    request = read_request(options, flags)
    text = render_script(request)
    if options.to is None:
        sys.stdout.write(text)
        return RingtrainError.exit_code if has_lost_stdout() else 0
    require_same_kind(options.to, b"\n# ringtrain: ", kind="a batch script of ringtrain", option="to")
    try:
        with replacing(options.to) as file:
            if request.env:
                os.fchmod(file.fileno(), 0o600)  # first: values of --env may be secrets
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"to is {str(options.to)!r}, which cannot be written: {error.strerror}.") from error
    return 0


def submit(arguments: Sequence[str]) -> int:
    from .script import render as render_script

    options, flags = create_request_parser("submit", f"Submit a batch script to Slurm. {WHAT}").parse(arguments)
    request = read_request(options, flags, max_members=options.array and find_max_array_size())
    # Slurm would misread it, and so fail the job silently.
    if not Path(request.output).is_absolute() and set("%\\") & set(os.getcwd()):
        raise UsageError(
            f"output is {request.output!r}, in the directory {os.getcwd()!r}; Slurm reads % and \\ in a path as "
            "patterns. Submit from another directory, or give --output an absolute path."
        )
    if shutil.which("sbatch") is None:
        raise UsageError(
            "sbatch is not on PATH. Submit on a login node of the cluster, or write the script with render --to FILE."
        )
    answer = submit_script(text=render_script(request))
    if not answer.is_good:
        raise UsageError(f"sbatch does not take the job: {answer.text}")
    print("\n".join(map(escape, advise(request, answer.text))))
    return 0


def after(arguments: Sequence[str]) -> int:
    with explaining_import("launch slurm after"):
        from .after import follow_up

    parser = Parser(
        f"{PROGRAM} slurm after",
        usage=SUPPRESS,
        description="The last line of a batch script: requeue the job if its run can resume, or say how\n"
        "the run ended and return its exit code.",
    )
    parser.add_argument("--status", type=int, required=True, help="exit code of srun or horovodrun")
    parser.add_argument("--script", type=Path, required=True, help="the batch script itself")
    parser.add_argument("--max_requeues", type=int, required=True, help="how often the job may be started again")
    parser.add_argument(
        "--max_restarts", type=int, default=0, help="how often after failures without a newer checkpoint"
    )
    parser.add_argument("--spare_nodes", type=int, default=0, help="how many lost nodes the job can do without")
    parser.add_argument("--lost_nodes", nargs="*", default=(), metavar="NODE", help="those lost before")
    options, _ = parser.parse(arguments)
    return follow_up(**vars(options))


def status(arguments: Sequence[str]) -> int:
    with explaining_import("launch slurm status"):
        from .status import show

    parser = Parser(
        f"{PROGRAM} slurm status",
        usage="%(prog)s [DIR]",
        description="Show the runs in a directory and their jobs: state, step, loss, time left,\n"
        "last error. On a terminal it goes on until Ctrl-C.",
        epilog=f"example:\n  {PROGRAM} slurm status runs",
    )
    parser.add_argument("directory", nargs="?", type=Path, default=Path("runs"), metavar="DIR", help="(default: runs)")
    options, _ = parser.parse(arguments)
    return show(options.directory)


def create_request_parser(command: str, description: str) -> Parser:
    parser = Parser(
        f"{PROGRAM} slurm {command}",
        usage="%(prog)s --nodes M [OPTIONS] -- FLAGS",
        description=description,
        epilog=f"example:\n  {PROGRAM} slurm {command} --nodes 2 --gpus_per_node 4 \\\n"
        "      --cpus_per_rank 8 --time 12:00:00 -- --workload cifar10",
    )
    add = parser.add_argument
    for name, each in OPTIONS.items():
        kind = int if each.metadata["metavar"] == "N" else str
        add(f"--{name}", type=kind, required=each.default is MISSING, **each.metadata)
    add("--array", metavar="FILE|SETTINGS", help="a run for each combination of settings, or of each line of a file")
    add("--mpi", default="auto", help="pmix, pmi2, horovodrun, or auto: the best of srun --mpi=list (default: auto)")
    add("--no_requeue", action="store_true", help="never start it again, except on spare nodes")
    add("--module", action="append", metavar="NAME", help=f"module to load; {MANY}")
    add("--env", action="append", metavar="NAME=VALUE", help=f"variable to set; {MANY}")
    return parser


def read_request(options: Namespace, flags: Sequence[str], *, max_members: int | None = None) -> JobRequest:
    check_flags(flags)
    values = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
    if options.array is not None:
        if flags and flags[0] != "train" and not flags[0].startswith("-"):
            raise UsageError(
                f"array is for runs of workloads, and what follows -- begins with {flags[0]!r}. Leave it out."
            )
        members = read_members(options.array, flags)
        if max_members is not None and len(members) > max_members:
            raise UsageError(
                f"array has {len(members):,} runs, and this site's MaxArraySize is {max_members:,}. Submit it in parts."
            )
        for member in members:
            check_flags([*flags, *member.flags], what=f"the run '{member}' of the array cannot start")
        values = {"output": "%x-%A_%a.out", **values, "members": tuple(member.flags for member in members)}
    elif options.array_limit is not None:
        raise UsageError("array_limit is given without array. Give --array too, or leave --array_limit out.")
    variables = tuple((name, value) for name, _, value in (text.partition("=") for text in options.env or ()))
    if wrong := [text for text in options.env or () if "=" not in text]:
        raise UsageError(f"env is {wrong[0]!r}; it must be NAME=VALUE.")
    return JobRequest(
        **values,
        mpi=find_mpi(print_line) if options.mpi == "auto" else options.mpi,
        can_requeue=not options.no_requeue,
        modules=tuple(options.module or ()),
        env=variables,
        flags=tuple(flags),
    )


def check_flags(flags: Sequence[str], *, what: str = "what follows -- is for ringtrain, and wrong") -> None:
    from ringtrain.cli import COMMANDS as RINGTRAIN_COMMANDS  # so that help needs no parser
    from ringtrain.commands.parser import parse_arguments
    from ringtrain.commands.preparing import check_settings
    from ringtrain.commands.train import Options
    from ringtrain.runtime.world import read_world

    require_script(flags)
    if is_script(flags):
        return
    words = list(flags)
    if words and not words[0].startswith("-"):
        command = words.pop(0)
        require_command(command, RINGTRAIN_COMMANDS, of="of ringtrain's named ")
        if command != "train":
            return
    no_launcher = read_world({})
    try:
        explicit = parse_arguments(Options, words, no_launcher)
        # These paths may exist on the nodes only.
        for name in ("data_dir", "init_from", "print_config"):
            explicit.pop(name, None)
        check_settings(explicit)
    except UsageError as error:
        message = str(error).removesuffix("See --help.").strip()
        raise UsageError(f"{what}: {message} See {TRAIN_HELP}.") from None


def advise(request: JobRequest, number: str) -> list[str]:
    names = {"%x": request.job_name, "%j": number, "%A": number, "%a": "*", "%%": "%"}
    output = re.sub("%[xjAa%]", lambda sign: names[sign[0]], request.output)
    output = output if request.members else shlex.quote(output)
    run = None if request.members or is_script(request.flags) else read_flag(request.flags, "out")
    stop = shlex.quote(str(Path(run, "stop"))) if run else "RUN/stop, where RUN is its run directory"
    # Under horovodrun the ranks belong to no Slurm step: signal the script.
    signal = f"scancel {'--batch ' if request.mpi == 'horovodrun' else ''}--signal=USR1 {number}"
    again = [f"  save and start again:  {signal}"] if request.can_requeue else []
    look = f"{PROGRAM} slurm status {shlex.quote(read_flag(request.flags, 'out') or 'runs')}"
    members = [f"  look at its runs:      {look}"] if request.members else []
    return [
        f"job {number} is submitted; it writes into {output}",
        *members,
        f"  follow it:             tail -F {output}",
        f"  save and stop it:      touch {stop}",
        *again,
        f"  end it in seconds:     scancel {number}",
    ]


COMMANDS = {"render": render, "submit": submit, "status": status, "after": after}
