"""The command line: ``python -m ringtrain [COMMAND] [FLAGS]``. Without a command it trains."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ringtrain.commands.flags import (
    EXPORT_FORMATS,
    SOURCE_KINDS,
    create_bench_parser,
    create_convert_parser,
    create_doctor_parser,
    create_eval_parser,
    create_export_parser,
    create_init_parser,
    create_report_parser,
    create_train_parser,
    create_verify_parser,
    create_workloads_parser,
    parse_arguments,
)
from ringtrain.commands.help import PROGRAM, show_overview
from ringtrain.commands.starting_file import write_starting_file
from ringtrain.config import Config, make_config, to_plain
from ringtrain.errors import RingtrainError, UsageError
from ringtrain.messages.escaping import escape, escape_message
from ringtrain.run.checkpoint import BEST, find_checkpoint
from ringtrain.run.directory import CONFIG_FILE, REPORT_FILE, read_config, refuse_taken
from ringtrain.run.identity import require_own
from ringtrain.runtime.devices import start_tensorflow
from ringtrain.runtime.stopping import StopRequests
from ringtrain.runtime.streams import has_lost_stdout
from ringtrain.runtime.world import World, read_world
from ringtrain.terminal.startup import quiet_start
from ringtrain.training.ending import early_end, report_end, report_error
from ringtrain.training.joining import Prepared, adapt, joined, pin
from ringtrain.training.together import evaluate_together, train_together
from ringtrain.workloads import BUILT_IN, check_workload_name, create_workload, is_file_within, load_workload
from ringtrain.workloads.listing import list_workloads

MAX_SHARDS = 99_999  # a shard's number has five digits


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (see ``ringtrain.errors``)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_named = bool(arguments) and not arguments[0].startswith("-")
    command = arguments.pop(0) if is_named else "train"
    try:
        world = read_world(os.environ)
    except RingtrainError as error:
        print(escape_message(f"ringtrain: {error}"), file=sys.stderr)
        return error.exit_code
    try:
        if arguments in (["-h"], ["--help"]) and not is_named:
            if world.is_rank0:
                print(show_overview(COMMANDS), end="")
            return 0
        run_command = (COMMANDS | INTERNAL_COMMANDS).get(command)
        if run_command is None:
            near = difflib.get_close_matches(command, COMMANDS, n=1)
            meant = f"--workload {command}" if command.endswith(".py") else repr(near[0]) if near else ""
            suggestion = f"Did you mean {meant}? " if meant else ""
            raise UsageError(
                f"there is no command {command!r}. {suggestion}Commands: {', '.join(COMMANDS)}.", reach="run"
            )
        code = run_command(arguments, world)
        return code if command == "train" else fail_unheard(code)
    except RingtrainError as error:
        report_end(error, world)
        return error.exit_code


def fail_unheard(code: int) -> int:
    """The exit code of a command of which nothing is left but what it prints."""
    return RingtrainError.exit_code if code == 0 and has_lost_stdout() else code


def train_command(arguments: Sequence[str], world: World) -> int:
    """Train a workload: what is done where no command is named."""
    explicit = parse_arguments(create_train_parser(), arguments, world)
    if explicit.pop("print_config", False):
        return fail_unheard(print_config(explicit, world))
    with StopRequests() as requests:
        requests.at_early_end(lambda reason, exit_code: report_error(early_end(reason, exit_code), world))
        prepared = prepare(explicit, world)
        with joined(prepared, world, command="train") as (collective, watchdog):
            train_together(prepared, collective, requests, watchdog)
    return 0


def eval_command(arguments: Sequence[str], world: World) -> int:
    """Evaluate a checkpoint of a run, with any number of processes."""
    wanted = parse_arguments(create_eval_parser(), arguments, world)
    run = require_run(wanted)
    settings = [f"--{name}={wanted[name]}" for name in ("data_dir", "hang_timeout") if name in wanted]
    prepared = prepare(read_settings("eval", arguments, wanted, settings, world), world)
    with joined(prepared, world, command="eval") as (collective, _):
        evaluate_together(prepared, collective, run, wanted.get("checkpoint", "best"))
    return 0


def export_command(arguments: Sequence[str], world: World) -> int:
    """Write the model of a run for use without ringtrain."""
    wanted = parse_arguments(create_export_parser(), arguments, world)
    refuse_launcher("export", world)
    run, form = require_run(wanted), wanted.get("format", EXPORT_FORMATS[0])
    if form not in EXPORT_FORMATS:
        raise UsageError(f"format is {form!r}; it must be one of {', '.join(EXPORT_FORMATS)}.", reach="run")
    data_dir = wanted.get("data_dir") or find_data(run)
    explicit = read_settings("export", arguments, wanted, [f"--data_dir={data_dir or 'null'}"], world)
    checkpoint = require_own(run, find_checkpoint(run, wanted.get("checkpoint", BEST)))
    ending = ".keras" if form == "keras" else ""
    output = wanted.get("output", run / "export" / (checkpoint.resolve().name.removeprefix(f"{BEST}-") + ending))
    if ending and output.suffix != ending:
        raise UsageError(f"output is {str(output)!r}; with --format keras it must end in .keras.", reach="run")
    refuse_taken(output)
    prepared = prepare(explicit, world)
    from ringtrain.export import export

    for line in export(prepared.workload, prepared.config, checkpoint, output, form):
        print(escape(line))
    return 0


def require_run(wanted: Mapping[str, Any]) -> Path:
    """The run directory that a command was given.

    Raises:
        UsageError: there is none.
    """
    run = wanted.get("run")
    if run is None or not os.path.isfile(run / CONFIG_FILE):
        raise UsageError(
            f"{str(run)!r} is no run directory: it holds no {CONFIG_FILE}. Give the directory of a run.", reach="run"
        )
    return run


def read_settings(
    command: str, arguments: Sequence[str], wanted: Mapping[str, Any], settings: Sequence[str], world: World
) -> dict[str, Any]:
    """The settings of a run that a command was given; of code, only what the user names.

    A run directory may be a stranger's, and importing the file that its configuration names would run it.

    Args:
        command: its name.
        arguments: as the user typed them.
        wanted: as they were read.
        settings: flags over those of the run.

    Raises:
        UsageError: the run's workload is code that the user has not named, or lies in the run directory.
    """
    run = require_run(wanted)
    explicit = parse_arguments(create_train_parser(), ["--config", str(run / CONFIG_FILE), *settings], world)
    spec = explicit["workload"] = wanted.get("workload", explicit.get("workload", Config.workload))
    if spec in BUILT_IN:
        return explicit
    if is_file_within(spec, run):
        raise UsageError(
            f"the workload {spec!r} is Python code in the run directory itself, which may come from anybody: {command} "
            "does not run it. Where you trust it, copy it to another directory and name the copy with --workload.",
            reach="run",
        )
    if "workload" not in wanted:
        typed = shlex.join([*PROGRAM.split(), command, *arguments, "--workload", spec])
        raise UsageError(
            f"the run's {CONFIG_FILE} names the workload {spec!r}: Python code, which {command} would run. A run "
            f"directory may come from anybody, so the command has to name it. Where you trust it: {typed}",
            reach="run",
        )
    return explicit


def find_data(run: Path) -> Path | None:
    """The directory of the data that a run was trained on; None where it is not there any more."""
    data_dir = (read_config(run) or {}).get("data_dir")
    return Path(data_dir) if data_dir and Path(data_dir).is_dir() else None


def refuse_launcher(command: str, world: World) -> None:
    """See that a command that is one process is started as one.

    Raises:
        UsageError: a launcher started several.
    """
    if world.size > 1:
        raise UsageError(
            f"{command} is one process, but {world.launcher} started {world.size}. Use no launcher.", reach="run"
        )


def verify_command(arguments: Sequence[str], world: World) -> int:
    """See that N processes train what one trains, on your own model."""
    from ringtrain.verify.compare import DEFAULT_GLOBAL_BATCH_SIZE, parse_world_sizes, verify

    refuse_launcher("verify", world)
    explicit = parse_arguments(create_verify_parser(), arguments, world)
    sizes, with_oracle = parse_world_sizes(explicit.pop("world_sizes", "1,2,3")), explicit.pop("oracle", False)
    explicit = {"global_batch_size": DEFAULT_GLOBAL_BATCH_SIZE, **explicit}
    check_settings(explicit)
    print_line = functools.partial(print, flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="ringtrain-verify-") as directory:
            settings = Path(directory) / "settings.yaml"
            settings.write_text(yaml.safe_dump(to_plain(explicit)), encoding="utf-8")
            print_line(f"training under each of the world sizes {', '.join(map(str, sizes))}")
            arguments = ["--config", str(settings)]
            for line in verify(sizes, arguments, Path(directory), with_oracle=with_oracle, print_line=print_line):
                print(escape(line))
    except KeyboardInterrupt:
        print("ringtrain: verify was interrupted; its processes are gone.", file=sys.stderr)
        return 128 + signal.SIGINT
    print("the world sizes train the same")
    return 0


def convert_command(arguments: Sequence[str], world: World) -> int:
    """Make TFRecord files of an image folder or of CIFAR-10."""
    wanted = parse_arguments(create_convert_parser(), arguments, world)
    refuse_launcher("convert", world)
    num_shards, kind = wanted.get("shards"), wanted.get("kind", "auto")
    if num_shards is not None and not 1 <= num_shards <= MAX_SHARDS:
        raise UsageError(f"shards is {num_shards}; it must be from 1 to {MAX_SHARDS:,}.", reach="run")
    if kind not in SOURCE_KINDS:
        raise UsageError(f"kind is {kind!r}; it must be one of {', '.join(SOURCE_KINDS)}.", reach="run")
    pin(world)
    with quiet_start():
        import tensorflow as tf

        # It needs no GPU, whose memory may be another's. What TensorFlow says of a missing driver is held back here.
        tf.config.set_visible_devices([], "GPU")
        from ringtrain.data.formats.conversion import convert
    made = convert(wanted["source"], wanted["destination"], kind=kind, num_shards=num_shards)
    print(escape(f"{wanted['destination']}: {made}"))
    return 0


def workloads_command(arguments: Sequence[str], world: World) -> int:
    """List the built-in workloads, with what they train on."""
    parse_arguments(create_workloads_parser(), arguments, world)
    if world.is_rank0:
        print(list_workloads())
    return 0


def init_command(arguments: Sequence[str], world: World) -> int:
    """Write a workload of your own to begin with, which trains at once."""
    wanted = parse_arguments(create_init_parser(), arguments, world)
    refuse_launcher("init", world)
    path = wanted["file"]
    write_starting_file(path)
    print(escape(f"{path}: a model, its data and its loss, for you to change. Train it:"))
    print(escape(f"  horovodrun -np 2 {PROGRAM} --workload {shlex.quote(str(path))}"))
    return 0


def bench_command(arguments: Sequence[str], world: World) -> int:
    """Measure ringtrain against plain Horovod and others."""
    wanted = parse_arguments(create_bench_parser(), arguments, world)
    refuse_launcher("bench", world)
    from ringtrain.bench.command import MODES, BenchOptions, bench, show, write_page

    mode, file = wanted.pop("mode"), wanted.pop("file", None)
    print_line = functools.partial(print, flush=True)
    if mode == "show" and file is not None:
        show(file, print_line)
        return 0
    if mode == "page" and file is None:
        write_page(print_line)
        return 0
    if mode not in (*MODES, "all") or file is not None:
        raise UsageError(
            f"there is nothing like bench {mode}{' FILE' if file else ''}; it is bench {', '.join(MODES)} or all, or "
            "bench show FILE or bench page.",
            reach="run",
        )
    return bench(mode, BenchOptions(**wanted), arguments, print_line)


def doctor_command(arguments: Sequence[str], world: World) -> int:
    """Say whether training would work here, and what would help."""
    parse_arguments(create_doctor_parser(), arguments, world)
    from ringtrain.doctor.command import doctor

    return doctor(world)


def report_command(arguments: Sequence[str], world: World) -> int:
    """Write what happened in one run or several as one HTML file."""
    wanted = parse_arguments(create_report_parser(), arguments, world)
    refuse_launcher("report", world)
    from ringtrain.report import write_report

    runs = wanted["runs"]
    target = wanted.get("output", runs[0] / REPORT_FILE if len(runs) == 1 else Path(REPORT_FILE))
    try:
        write_report(runs, target)
    except OSError as error:
        raise UsageError(
            f"the report cannot be written to {str(target)!r}: {error.strerror}. Give another place with --output.",
            reach="run",
        ) from None
    print(escape(f"the report of {len(runs)} run{'s' if len(runs) > 1 else ''} is in {target}"))
    return 0


def record_command(arguments: Sequence[str], world: World) -> int:
    """One process of a run of ``verify``."""
    parser = create_train_parser()
    parser.add_argument("--record_to", type=Path)
    parser.add_argument("--record_as", type=str)
    explicit = parse_arguments(parser, arguments, world)
    directory, role = explicit.pop("record_to"), explicit.pop("record_as")
    prepared = prepare(explicit, world)
    config = prepared.config
    if not {"steps", "epochs"} & set(explicit):
        from ringtrain.verify.compare import choose_steps

        config = dataclasses.replace(config, steps=choose_steps(prepared.workload.defaults), epochs=None)
    with joined(prepared, world, command="record") as (collective, _):
        if role == "oracle":
            from ringtrain.verify.oracle import record_with_oracle

            record_with_oracle(prepared.workload, config, collective, directory)
        else:
            from ringtrain.verify.record import record

            record(prepared.workload, config, collective, directory, is_reference=role == "reference")
    return 0


def prepare(explicit: Mapping[str, Any], world: World) -> Prepared:
    """Take this rank's devices, then start TensorFlow and import the workload."""
    config = check_settings(explicit)
    plan = pin(world, config)
    with quiet_start():
        workload_class = load_workload(config.workload)
        config = make_config(explicit, workload_class.defaults, workload_class.options)
        plan = adapt(plan, world, config, workload_class)
        device = start_tensorflow(plan, world)
    return Prepared(create_workload(workload_class, config.options), config, plan, device)


def check_settings(explicit: Mapping[str, Any]) -> Config:
    """Find a wrong setting before TensorFlow starts.

    A built-in workload's defaults are known without TensorFlow; a user's module may import it and waits.
    """
    spec = explicit.get("workload", Config.workload)
    check_workload_name(spec)
    if spec not in BUILT_IN:
        return make_config(explicit, {})
    workload_class = load_workload(spec)
    return make_config(explicit, workload_class.defaults, workload_class.options)


def print_config(explicit: Mapping[str, Any], world: World) -> int:
    """Print the settings of the run as YAML that ``--config`` reads."""
    check_settings(explicit)
    workload_class = load_workload(explicit.get("workload", Config.workload))
    config = make_config(explicit, workload_class.defaults, workload_class.options)
    if world.is_rank0:
        yaml.safe_dump(to_plain(dataclasses.asdict(config)), sys.stdout, sort_keys=False)
    return 0


COMMANDS: dict[str, Callable[[Sequence[str], World], int]] = {
    "train": train_command,
    "eval": eval_command,
    "report": report_command,
    "export": export_command,
    "verify": verify_command,
    "workloads": workloads_command,
    "init": init_command,
    "convert": convert_command,
    "doctor": doctor_command,
    "bench": bench_command,
}
# What the commands start themselves; not for the user.
INTERNAL_COMMANDS = {"_record": record_command}
