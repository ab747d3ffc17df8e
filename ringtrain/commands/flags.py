"""What a command line may hold: each command's flags, and what is wrong with those that were given."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ringtrain.commands.help import PROGRAM, show_help
from ringtrain.config import Config, OptimizerConfig, field_rules
from ringtrain.errors import UsageError
from ringtrain.messages.rules import shorten
from ringtrain.run.directory import CONFIG_FILE, load_settings
from ringtrain.runtime.launched import tell_left
from ringtrain.runtime.world import World

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

SOURCE_KINDS = ("auto", "image_folder", "cifar10")
EXPORT_FORMATS = ("keras", "saved_model")
CHECKPOINT_HELP = "best, newest, or a name such as step-000001000 (best)"
WORKLOAD_HELP = "the run's workload, as in training, where it is code of your own (the run's, where built in)"


def parse_arguments(parser: ArgumentParser, arguments: Sequence[str], world: World) -> dict[str, Any]:
    """What the user wrote: field names to values of the right types.

    Raises:
        UsageError: an unknown flag or key, a value of the wrong type, a file that cannot be read.
        SystemExit: after ``--help``.
    """
    from argparse import ArgumentError

    if {"-h", "--help"} & set(arguments):
        if world.is_rank0:
            print(show_help(parser), end="")
        tell_left()
        raise SystemExit(0)
    refuse_empty(arguments)
    refuse_unreadable_file(arguments)
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


def create_parser(command: str, purpose: str, examples: str, *, usage: str = "") -> ArgumentParser:
    """A command's parser, whose errors are ours to tell, and its screen of help (see ``ringtrain.commands.help``)."""
    from jsonargparse import ArgumentParser

    return ArgumentParser(
        prog=f"ringtrain {command}",
        usage=f"{command} {usage}".rstrip(),
        description=purpose,
        epilog=examples,
        exit_on_error=False,
        allow_abbrev=False,
        print_config=None,  # jsonargparse's own flag of that name
    )


def create_settings_parser(command: str, purpose: str, examples: str) -> ArgumentParser:
    """Flags from the fields of ``Config``, and the same names as keys of a YAML file."""
    from jsonargparse import ActionYesNo, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = create_parser(command, purpose, examples, usage="[--NAME VALUE ...] [--config FILE]")
    parser.add_argument(
        "--config", action="config", metavar="FILE", help="YAML file of these settings; flags win over it"
    )
    parser.add_argument("--print_config", action=ActionYesNo, help="print the settings of the run as YAML, and leave")
    parser.add_class_arguments(OptimizerConfig, "optimizer", help="optimizer")
    parser.add_class_arguments(Config, skip={"optimizer"}, help="settings")
    return parser


def create_train_parser() -> ArgumentParser:
    """The settings of a run."""
    return create_settings_parser(
        "[train]",
        "Train a Keras model on many GPUs or cores, one process each. The same command again goes on where a run "
        "ended. Defaults are in brackets; a workload's own win over them (--print_config shows those of a run).",
        f"""
        horovodrun -np 2 {PROGRAM}
        horovodrun -np 2 {PROGRAM} --workload my_workload.py --epochs 5
        """,
    )


def create_verify_parser() -> ArgumentParser:
    """The settings of a run, and the world sizes to compare."""
    parser = create_settings_parser(
        "verify",
        "Train the same batches under several numbers of processes, which it starts itself, and compare weights, "
        "optimizer slots, losses and samples. Use no launcher.",
        f"""
        {PROGRAM} verify
        {PROGRAM} verify --workload my_workload.py --world_sizes 1,2
        """,
    )
    parser.add_argument(
        "--world_sizes", type=str, metavar="N,N", default="1,2,3", help="numbers of processes, such as 1,2,3"
    )
    parser.add_argument(
        "--oracle",
        type=bool,
        default=False,
        help="also compare one process with a plain Keras loop, BatchNorm included",
    )
    return parser


def create_eval_parser() -> ArgumentParser:
    """The arguments of ``ringtrain eval``."""
    parser = create_parser(
        "eval",
        "Evaluate a checkpoint of a run, with any number of processes.",
        f"""
        {PROGRAM} eval runs/digits
        horovodrun -np 2 {PROGRAM} eval runs/digits --checkpoint newest
        """,
        usage="RUN [--NAME VALUE ...]",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of the run")
    parser.add_argument("--checkpoint", type=str, metavar="NAME", help=CHECKPOINT_HELP)
    parser.add_argument("--workload", type=str, metavar="NAME", help=WORKLOAD_HELP)
    parser.add_argument(
        "--data_dir", type=Path, metavar="DIR", help="directory of the workload's data, where it has moved"
    )
    parser.add_argument(
        "--hang_timeout", type=float, metavar="SECONDS", help="after which what hangs is ended (the run's)"
    )
    return parser


def create_export_parser() -> ArgumentParser:
    """The arguments of ``ringtrain export``."""
    parser = create_parser(
        "export",
        "Write the model of a run for use without ringtrain, with the weights that an evaluation uses. One process.",
        f"""
        {PROGRAM} export runs/digits
        {PROGRAM} export runs/digits --format saved_model --output digits
        """,
        usage="RUN [--NAME VALUE ...]",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of the run")
    parser.add_argument(
        "--format",
        type=str,
        metavar="NAME",
        help="keras: a .keras file, for keras.saving.load_model; saved_model: a directory, for tf.saved_model.load "
        "and TensorFlow Serving (keras)",
    )
    parser.add_argument("--checkpoint", type=str, metavar="NAME", help=CHECKPOINT_HELP)
    parser.add_argument("--workload", type=str, metavar="NAME", help=WORKLOAD_HELP)
    parser.add_argument(
        "--output", type=Path, metavar="PATH", help="what to write; it must not exist (RUN/export/step-NUMBER)"
    )
    parser.add_argument(
        "--data_dir", type=Path, metavar="DIR", help="directory of the workload's data, where it has moved"
    )
    return parser


def create_report_parser() -> ArgumentParser:
    """The arguments of ``ringtrain report``."""
    parser = create_parser(
        "report",
        "Write what happened in one run or several as one HTML file, which needs no network. One process.",
        f"""
        {PROGRAM} report runs/digits
        {PROGRAM} report runs/first runs/second --output compared.html
        """,
        usage="RUN [RUN ...] [--NAME VALUE ...]",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directories of runs; several are compared")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the file to write (RUN/report.html; of several report.html here)"
    )
    return parser


def create_convert_parser() -> ArgumentParser:
    """The arguments of ``ringtrain convert``."""
    parser = create_parser(
        "convert",
        "Make TFRecord files of an image folder or of CIFAR-10's binary files.",
        f"""
        {PROGRAM} convert images records
        {PROGRAM} convert data records --kind cifar10 --shards 8
        """,
        usage="SOURCE DESTINATION [--NAME VALUE ...]",
    )
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="directory with train/<class>/*.jpg|png, or of CIFAR-10's files"
    )
    parser.add_argument(
        "destination", type=Path, metavar="DESTINATION", help="directory to make; it must not exist, or be empty"
    )
    parser.add_argument("--shards", type=int, metavar="N", help="files for each split (about 128 MiB a file)")
    parser.add_argument(
        "--kind", type=str, metavar="NAME", help=f"what the source is: {', '.join(SOURCE_KINDS)} (auto)"
    )
    return parser


def create_init_parser() -> ArgumentParser:
    """The arguments of ``ringtrain init``."""
    parser = create_parser(
        "init",
        "Write a workload of your own to begin with: a file of forty lines that trains at once, on synthetic data.",
        f"""
        {PROGRAM} init my_workload.py
        horovodrun -np 2 {PROGRAM} --workload my_workload.py
        """,
        usage="FILE",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="Python file to write; it must not exist")
    return parser


def create_workloads_parser() -> ArgumentParser:
    """The arguments of ``ringtrain workloads``: none."""
    return create_parser("workloads", "List the built-in workloads, with what they train on.", f"{PROGRAM} workloads")


def create_doctor_parser() -> ArgumentParser:
    """The arguments of ``ringtrain doctor``: none."""
    return create_parser(
        "doctor",
        "Say whether training would work here, and what helps where it would not; under a launcher, whether its ranks "
        "can work together.",
        f"""
        {PROGRAM} doctor
        horovodrun -np 2 {PROGRAM} doctor
        """,
    )


def create_bench_parser() -> ArgumentParser:
    """The arguments of ``ringtrain bench``."""
    from jsonargparse import set_parsing_settings

    from ringtrain.bench.command import MODES, BenchOptions

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = create_parser(
        "bench",
        "Measure ringtrain against plain Horovod, tf.distribute and what no communication can be faster than, on a "
        "machine on which nothing else runs. It starts all processes itself. Use no launcher.",
        f"""
        {PROGRAM} bench step
        {PROGRAM} bench step --models CNN,WIDE --rounds 15
        {PROGRAM} bench show results/bench-step.json
        """,
        usage="MODE [FILE] [--NAME VALUE ...]",
    )
    parser.add_argument("mode", type=str, metavar="MODE", help=f"{', '.join(MODES)}, all, show, or page")
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="for show: a result file")
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
        return f"{wrong[1]} is {shorten(repr(wrong[2].strip()))}; it must be {field_rules()[wrong[1]]}."
    endless = re.search(r'Parser key "([\w.]+)":\s+Exceeds the limit', message)
    if endless:
        return f"{endless[1]} has thousands of digits; it must be {field_rules().get(endless[1], 'a whole number')}."
    if message.startswith('Parser key "optimizer":'):
        return "optimizer has several settings, each with a flag of its own, such as --optimizer.name. See --help."
    missing = re.match("the following arguments are required: (.*)", message)
    if missing:
        return f"{missing[1]} must be given. See --help."
    if re.match("Problems parsing config|Unexpected config", message):
        return f"{find_config_file(arguments)} holds no YAML mapping of settings: {' '.join(message.split())}"
    return " ".join(message.split())


def find_meant_setting(name: str, parser: ArgumentParser) -> str | None:
    """The setting that a wrong name comes close to: the same word in a group, or one spelled alike."""
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    names = [flag.removeprefix("--") for flag in flags]
    in_group = [known for known in names if known.endswith(f".{name}")]
    return next(iter(in_group or difflib.get_close_matches(name, names, n=1)), None)


def find_config_file(arguments: Sequence[str]) -> str | None:
    """The last file that the user gave with ``--config``; None where no value follows."""
    given = None
    for flag, following in zip(arguments, [*arguments[1:], None], strict=False):
        if flag == "--config":
            given = following
        elif flag.startswith("--config="):
            given = flag.removeprefix("--config=")
    return given


def refuse_empty(arguments: Sequence[str]) -> None:
    """See that no setting was given an empty text, which would be taken for a path: the current directory.

    A workload's own option may be one.

    Raises:
        UsageError: one was.
    """
    for flag, following in zip(arguments, [*arguments[1:], None], strict=False):
        name, has_value, value = flag.partition("=")
        if (
            name.startswith("--")
            and not name.startswith("--options")
            and "" in (value if has_value else None, following)
        ):
            raise UsageError(f"{name[2:]} is ''; give it a value, or leave it out.", reach="run")


def refuse_unreadable_file(arguments: Sequence[str]) -> None:
    """See that the file of settings can be read, and is small once its aliases are written out; else the parser hangs.

    Raises:
        UsageError: it cannot, or is not, or has an empty text where the parser would read a path.
    """
    file = find_config_file(arguments)
    if file is None:
        return
    try:
        refuse_other_files(file, load_settings(Path(file)))
        return
    except (UnicodeDecodeError, yaml.YAMLError):
        return  # the parser says what is wrong
    except ValueError as error:
        raise UsageError(f"{file} holds no settings: {error}.", reach="run") from None
    except FileNotFoundError:
        reason = "there is no such file. Check the path"
    except IsADirectoryError:
        reason = f"that is a directory. Name a YAML file, such as the {CONFIG_FILE} of a run"
    except OSError as error:
        reason = f"it cannot be read: {error.strerror}. Check the path"
    raise UsageError(f"config is {file!r}, and {reason}.", reach="run")


def refuse_other_files(file: str, settings: Any) -> None:
    """See that what a file of settings holds names no other one: the parser would read it, whatever it is.

    Raises:
        UsageError: it does, or is empty, or has an empty text, which the parser may take for the current directory.
    """
    if settings is None:
        raise UsageError(f"{file} is empty; it must hold settings, such as epochs: 5.", reach="run")
    if not isinstance(settings, Mapping):
        return  # the parser says what is wrong
    empty = [name for name, value in settings.items() if value == ""]
    if empty:
        raise UsageError(f"{empty[0]} is '' in {file}; give it a value, or leave it out.", reach="run")
    if "config" in settings:
        raise UsageError(f"{file} has the key config; a file of settings cannot name another one.", reach="run")
    if not isinstance(settings.get("optimizer", {}), Mapping | None):
        raise UsageError(
            f"optimizer is {shorten(repr(settings['optimizer']))}; it must be a mapping of settings, such as "
            "{name: adam}.",
            reach="run",
        )
