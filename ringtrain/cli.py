"""The command line: ``python -m ringtrain [COMMAND] [FLAGS]``. Without a command it trains."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import yaml

from ringtrain.config import Config, OptimizerConfig, make_config, to_plain
from ringtrain.devices import start_tensorflow
from ringtrain.errors import RingtrainError, UsageError
from ringtrain.startup import quiet_start
from ringtrain.stopping import StopRequests
from ringtrain.together import (
    Prepared,
    early_end,
    evaluate_together,
    joined,
    pin,
    report_end,
    report_error,
    train_together,
)
from ringtrain.workloads import BUILT_IN, check_workload_name, create_workload, load_workload
from ringtrain.world import World, read_world

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


SOURCE_KINDS = ("auto", "image_folder", "cifar10")
TRAIN_DESCRIPTION = "Train a Keras model on many GPUs, one process per GPU: horovodrun -np 2 python -m ringtrain"
DOCTOR_DESCRIPTION = (
    "Say whether training would work here, and what helps where it would not; under a launcher, among its ranks: "
    "horovodrun -np 2 python -m ringtrain doctor"
)
BENCH_DESCRIPTION = (
    "Measure ringtrain against plain Horovod, tf.distribute and what no communication can be faster than: "
    "ringtrain bench step"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (see ``ringtrain.errors``)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "train"
    try:
        world = read_world(os.environ)
    except RingtrainError as error:
        print(f"ringtrain: {error}", file=sys.stderr)
        return error.exit_code
    try:
        run_command = (COMMANDS | INTERNAL_COMMANDS).get(command)
        if run_command is None:
            near = difflib.get_close_matches(command, COMMANDS, n=1)
            suggestion = f"Did you mean {near[0]!r}? " if near else ""
            raise UsageError(
                f"there is no command {command!r}. {suggestion}Commands: {', '.join(COMMANDS)}.", reach="run"
            )
        return run_command(arguments, world)
    except RingtrainError as error:
        report_end(error, world)
        return error.exit_code


def train_command(arguments: Sequence[str], world: World) -> int:
    """Train, from the command line to the last line of the log."""
    explicit = parse_arguments(create_train_parser(), arguments, world)
    if explicit.pop("print_config", False):
        return print_config(explicit, world)
    with StopRequests() as requests:
        requests.at_early_end(lambda reason, exit_code: report_error(early_end(reason, exit_code), world))
        prepared = prepare(explicit, world)
        with joined(prepared, world, command="train") as (collective, watchdog):
            train_together(prepared, collective, requests, watchdog)
    return 0


def eval_command(arguments: Sequence[str], world: World) -> int:
    """Evaluate a checkpoint of a run, on as many ranks as were started."""
    from ringtrain.run_directory import CONFIG_FILE

    parser = create_eval_parser()
    wanted = parse_arguments(parser, arguments, world)
    run = wanted.get("run")
    if run is None or not (run / CONFIG_FILE).is_file():
        raise UsageError(
            f"{str(run)!r} is no run directory: it holds no {CONFIG_FILE}. Give the directory of a run.", reach="run"
        )
    data_dir = ["--data_dir", str(wanted["data_dir"])] if "data_dir" in wanted else []
    watch = ["--hang_timeout", str(wanted["hang_timeout"])] if "hang_timeout" in wanted else []
    settings = ["--config", str(run / CONFIG_FILE), *data_dir, *watch]
    prepared = prepare(parse_arguments(create_train_parser(), settings, world), world)
    with joined(prepared, world, command="eval") as (collective, _):
        evaluate_together(prepared, collective, run, wanted.get("checkpoint", "best"))
    return 0


def verify_command(arguments: Sequence[str], world: World) -> int:
    """See that N processes train what one trains. Starts the processes itself."""
    from ringtrain.verify import DEFAULT_GLOBAL_BATCH_SIZE, DEFAULT_STEPS, parse_world_sizes, verify

    if world.size > 1:
        raise UsageError(
            f"verify starts its processes itself, but {world.launcher} started {world.size}. Use no launcher.",
            reach="run",
        )
    parser = create_train_parser("verify", "Train the same batches under several world sizes and compare the results.")
    parser.add_argument("--world_sizes", type=str, default="1,2,3", help="numbers of processes, such as 1,2,3")
    explicit = parse_arguments(parser, arguments, world)
    sizes = parse_world_sizes(explicit.pop("world_sizes", "1,2,3"))
    explicit = {"steps": DEFAULT_STEPS, "global_batch_size": DEFAULT_GLOBAL_BATCH_SIZE, **explicit}
    check_settings(explicit)
    with tempfile.TemporaryDirectory(prefix="ringtrain-verify-") as directory:
        settings = Path(directory) / "settings.yaml"
        settings.write_text(yaml.safe_dump(to_plain(explicit)), encoding="utf-8")
        print(
            f"training {explicit['steps']} steps under each of the world sizes {', '.join(map(str, sizes))}", flush=True
        )
        for line in verify(sizes, ["--config", str(settings)], Path(directory)):
            print(line)
    print("the world sizes train the same")
    return 0


def convert_command(arguments: Sequence[str], world: World) -> int:
    """Make TFRecord files of an image folder or of CIFAR-10."""
    if world.size > 1:
        raise UsageError(
            f"convert is one process, but {world.launcher} started {world.size}. Use no launcher.", reach="run"
        )
    wanted = parse_arguments(create_convert_parser(), arguments, world)
    num_shards, kind = wanted.get("shards"), wanted.get("kind", "auto")
    if num_shards is not None and num_shards < 1:
        raise UsageError(f"shards is {num_shards}; it must be at least 1.", reach="run")
    if kind not in SOURCE_KINDS:
        raise UsageError(f"kind is {kind!r}; it must be one of {', '.join(SOURCE_KINDS)}.", reach="run")
    pin(world)
    with quiet_start():
        import tensorflow as tf  # noqa: F401, here, where its messages are held back

        from ringtrain.convert import convert
    made = convert(wanted["source"], wanted["destination"], kind=kind, num_shards=num_shards)
    print(f"{wanted['destination']}: {made}")
    return 0


def bench_command(arguments: Sequence[str], world: World) -> int:
    """Measure ringtrain against others, or show what was measured. Starts the processes itself."""
    if world.size > 1:
        raise UsageError(
            f"bench starts its processes itself, but {world.launcher} started {world.size}. Use no launcher.",
            reach="run",
        )
    from ringtrain.bench.command import MODES, BenchOptions, bench, show

    wanted = parse_arguments(create_bench_parser(), arguments, world)
    mode, file = wanted.pop("mode"), wanted.pop("file", None)
    say = functools.partial(print, flush=True)
    if mode == "show" and file is not None:
        show(file, say)
        return 0
    if mode not in (*MODES, "all") or file is not None:
        raise UsageError(
            f"there is nothing like bench {mode}{' FILE' if file else ''}; it is bench {', '.join(MODES)} or all, or "
            "bench show FILE.",
            reach="run",
        )
    return bench(mode, BenchOptions(**wanted), arguments, say)


def doctor_command(arguments: Sequence[str], world: World) -> int:
    """Say whether training would work here, and what helps where it would not."""
    parse_arguments(create_parser("doctor", DOCTOR_DESCRIPTION), arguments, world)
    from ringtrain.doctor.command import doctor

    return doctor(world)


def record_command(arguments: Sequence[str], world: World) -> int:
    """One process of a run of ``verify``."""
    parser = create_train_parser()
    parser.add_argument("--record_to", type=Path)
    explicit = parse_arguments(parser, arguments, world)
    directory = explicit.pop("record_to")
    prepared = prepare(explicit, world)
    with joined(prepared, world, command="record") as (collective, _):
        from ringtrain.record import record

        record(prepared.workload, prepared.config, collective, directory)
    return 0


def prepare(explicit: Mapping[str, Any], world: World) -> Prepared:
    """Take this rank's devices, then start TensorFlow and import the workload."""
    config = check_settings(explicit)
    plan = pin(world, deterministic=config.deterministic, hang_timeout=config.hang_timeout)
    with quiet_start():
        workload_class = load_workload(config.workload)
        device = start_tensorflow(plan, world)
    config = make_config(explicit, workload_class.defaults, workload_class.options)
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


def parse_arguments(parser: ArgumentParser, arguments: Sequence[str], world: World) -> dict[str, Any]:
    """What the user wrote: field names to values of the right types.

    Raises:
        UsageError: an unknown flag or key, a value of the wrong type, a file that cannot be read.
        SystemExit: after ``--help``.
    """
    from argparse import ArgumentError

    if {"-h", "--help"} & set(arguments):
        if world.is_first:
            parser.print_help()
        raise SystemExit(0)
    try:
        explicit = parser.parse_args(list(arguments), defaults=False).clone(with_meta=False).as_dict()
    except UnicodeDecodeError as error:
        raise UsageError(f"{find_config_file(arguments)} holds no text in UTF-8: {error}.", reach="run") from None
    except (ArgumentError, yaml.YAMLError) as error:
        raise UsageError(explain_parse_error(str(error), parser, arguments), reach="run") from None
    explicit.pop("config", None)
    for name in ("optimizer", "options"):
        if explicit.get(name) is not None and not isinstance(explicit[name], Mapping):
            raise UsageError(f"{name} is {explicit[name]!r}; it must be a mapping of settings.", reach="run")
    return without_nothing(explicit)


def without_nothing(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those whose value is None: what a file leaves empty has its default."""
    return {
        key: without_nothing(value) if key == "optimizer" and isinstance(value, Mapping) else value
        for key, value in settings.items()
        if value is not None
    }


def create_parser(command: str, description: str) -> ArgumentParser:
    """A command's parser, whose errors are ours to tell."""
    from jsonargparse import ArgumentParser

    return ArgumentParser(
        prog=f"ringtrain {command}",
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
        print_config=None,  # jsonargparse's own flag of that name
    )


def create_train_parser(command: str = "[train]", description: str = TRAIN_DESCRIPTION) -> ArgumentParser:
    """Flags from the fields of ``Config``, and the same names as keys of a YAML file."""
    from jsonargparse import ActionYesNo, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = create_parser(command, description)
    parser.add_argument("--config", action="config", help="YAML file of the settings below; flags win over it")
    parser.add_argument("--print_config", action=ActionYesNo, help="print the settings of the run as YAML, and leave")
    parser.add_class_arguments(OptimizerConfig, "optimizer", help="optimizer")
    parser.add_class_arguments(Config, skip={"optimizer"}, help="settings")
    return parser


def create_eval_parser() -> ArgumentParser:
    """The arguments of ``ringtrain eval``."""
    parser = create_parser(
        "eval", "Evaluate a checkpoint of a run: horovodrun -np 2 python -m ringtrain eval runs/digits"
    )
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--checkpoint", type=str, help="best, newest, or a name such as step-000001000 (default: best)")
    parser.add_argument("--data_dir", type=Path, help="directory of the workload's data, where it has moved")
    parser.add_argument(
        "--hang_timeout", type=float, help="seconds after which what hangs is ended (default: the run's)"
    )
    return parser


def create_convert_parser() -> ArgumentParser:
    """The arguments of ``ringtrain convert``."""
    parser = create_parser("convert", "Make TFRecord files of an image folder or of CIFAR-10's binary files.")
    parser.add_argument("source", type=Path, help="directory with train/<class>/*.jpg|png, or of CIFAR-10's files")
    parser.add_argument("destination", type=Path, help="directory to make; it must not exist, or be empty")
    parser.add_argument("--shards", type=int, help="files for each split (default: about 128 MiB a file)")
    parser.add_argument("--kind", type=str, help=f"what the source is: {', '.join(SOURCE_KINDS)} (default: auto)")
    return parser


def create_bench_parser() -> ArgumentParser:
    """The arguments of ``ringtrain bench``."""
    from jsonargparse import set_parsing_settings

    from ringtrain.bench.command import MODES, BenchOptions

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = create_parser("bench", BENCH_DESCRIPTION)
    parser.add_argument("mode", type=str, help=f"{', '.join(MODES)}, all, or show")
    parser.add_argument("file", type=Path, nargs="?", help="for show: a result file")
    parser.add_class_arguments(BenchOptions, help="settings")
    return parser


def explain_parse_error(message: str, parser: ArgumentParser, arguments: Sequence[str]) -> str:
    """A parser's message as one line: the flag, its value and the rule, or the flag that may have been meant."""
    message = re.sub(r"Group '(\S+)' does not accept option '(\S+)'", r"Key '\1.\2'", message)
    unknown = re.search(r"(?:unrecognized arguments: |Key '|Option ')(--)?([\w.]+)", message)
    if unknown:
        prefix = unknown[1] or ""
        meant = find_meant_setting(unknown[2], parser)
        suggestion = f"Did you mean {prefix}{meant}? " if meant else ""
        return f"there is no {'flag' if prefix else 'key'} {prefix}{unknown[2]}. {suggestion}See --help."
    wrong = re.search(r'Parser key "([\w.]+)".*(?:Given value|Got value): (.*)', message, re.DOTALL)
    if wrong and wrong[1] in field_rules():
        return f"{wrong[1]} is {wrong[2].strip()!r}; it must be {field_rules()[wrong[1]]}."
    if re.match("Problems parsing config|Unexpected config", message):
        return f"{find_config_file(arguments)} holds no YAML mapping of settings: {' '.join(message.split())}"
    return " ".join(message.split())


def find_meant_setting(name: str, parser: ArgumentParser) -> str | None:
    """The setting that a wrong name comes close to: the same word in a group, or one spelled alike."""
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    names = [flag.removeprefix("--") for flag in flags]
    in_group = [known for known in names if known.endswith(f".{name}")]
    return next(iter(in_group or difflib.get_close_matches(name, names, n=1)), None)


def find_config_file(arguments: Sequence[str]) -> str:
    """The last file that the user gave with ``--config``."""
    text = " ".join(arguments)
    return re.findall(r"--config[= ](\S+)", text)[-1]


def field_rules() -> dict[str, str]:
    """What each setting must be, in words, from the types of the configuration's fields."""
    words = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path", str: "a text"}
    rules = {}
    for prefix, settings in (("", Config), ("optimizer.", OptimizerConfig)):
        for name, hint in get_type_hints(settings).items():
            options = [option for option in get_args(hint) if option is not type(None)]
            if get_origin(hint) is dict:
                rules[prefix + name] = "a mapping; write --options.NAME VALUE"
            elif options and isinstance(options[0], str):
                rules[prefix + name] = f"one of {', '.join(options)}"
            else:
                rules[prefix + name] = words.get(options[0] if options else hint, "a mapping")
    return rules


def print_config(explicit: Mapping[str, Any], world: World) -> int:
    """Print the settings of the run as YAML that ``--config`` reads."""
    check_settings(explicit)
    workload_class = load_workload(explicit.get("workload", Config.workload))
    config = make_config(explicit, workload_class.defaults, workload_class.options)
    if world.is_first:
        yaml.safe_dump(to_plain(dataclasses.asdict(config)), sys.stdout, sort_keys=False)
    return 0


COMMANDS: dict[str, Callable[[Sequence[str], World], int]] = {
    "train": train_command,
    "eval": eval_command,
    "verify": verify_command,
    "convert": convert_command,
    "doctor": doctor_command,
    "bench": bench_command,
}
# What the commands start themselves; not for the user.
INTERNAL_COMMANDS = {"_record": record_command}
