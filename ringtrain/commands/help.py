"""The screens of ``--help``: what a command is for, how it is called, and its flags in groups."""

from __future__ import annotations

import shutil
import textwrap
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

PROGRAM = "python -m ringtrain"
MAX_COLUMNS = 100
FLAG_COLUMNS = 27
LONGEST_CHOICE = 20  # characters of a|b|c beside a flag; longer choices stand in its text

OVERVIEW = f"""\
usage: {PROGRAM} [COMMAND] [ARGUMENTS]

Trains a TensorFlow/Keras model on many GPUs or cores, one process each, which a
launcher starts. Without a command it trains.

commands:
{{commands}}

examples:
  horovodrun -np 2 {PROGRAM}
  horovodrun -np 2 {PROGRAM} --workload cifar10 --data_dir data
  {PROGRAM} init my_workload.py

Each command's flags and examples: {PROGRAM} COMMAND --help
"""

# Of the settings (``ringtrain.config``); a test holds that each has its place, and one.
GROUPS: Mapping[str, Sequence[str]] = {
    "run": (
        "workload", "options", "epochs", "steps", "batch_size", "global_batch_size", "out", "resume", "init_from",
        "seed", "config", "print_config",
    ),
    "data": ("data_dir", "synthetic", "cache", "on_bad_sample"),
    "evaluation and saving": (
        "log_every", "profile", "eval_every_epochs", "eval_every", "best_metric", "best_direction", "stop_after",
        "checkpoint_every", "keep", "max_hours",
    ),
    "optimizer": (
        "optimizer.name", "optimizer.lr", "optimizer.lr_scale", "optimizer.warmup_epochs", "optimizer.schedule",
        "optimizer.decay_rate", "optimizer.decay_epochs", "optimizer.momentum", "optimizer.nesterov", "optimizer.rho",
        "optimizer.epsilon", "optimizer.weight_decay", "optimizer.clip_global_norm", "optimizer.ema",
    ),
    "computing and communication": ("precision", "accumulate", "compression", "backend", "deterministic"),
    "guards": ("on_nonfinite", "check_replicas_every", "hang_timeout", "exit_timeout", "detached"),
}  # fmt: skip


def show_overview(commands: Mapping[str, Callable[..., int]]) -> str:
    """The commands, each with the first line of what its function says of itself."""
    lines = [f"  {name:<11}{(command.__doc__ or '').splitlines()[0]}" for name, command in commands.items()]
    return OVERVIEW.format(commands="\n".join(lines))


def show_help(parser: ArgumentParser) -> str:
    """A command's screen: usage, purpose, examples (the parser's epilog), then the flags."""
    columns = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    usage = f"usage: {PROGRAM} {parser.usage}"
    purpose = textwrap.fill(parser.description or "", columns)
    examples = textwrap.indent(textwrap.dedent(parser.epilog or "").strip(), "  ")
    parts = [usage, purpose, f"examples:\n{examples}"]
    for title, actions in _grouped(parser):
        lines = [line for action in actions for line in _describe(action, columns)]
        parts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(parts) + "\n"


def value_word(hint: Any) -> str:
    """What stands for a value behind its flag: N, X, NAME, PATH, or the values that it may have."""
    choice = "|".join(_choices(hint))
    if choice:
        return choice if len(choice) <= LONGEST_CHOICE else "NAME"
    kind = next((option for option in get_args(hint) if option is not type(None)), hint)
    return {int: "N", float: "X", bool: "true|false", str: "NAME"}.get(kind, "PATH")


def _grouped(parser: ArgumentParser) -> Iterator[tuple[str, list[Action]]]:
    """A command's own arguments, then the settings of a run by groups, where it takes those."""
    actions = {a.dest: a for a in parser._actions if a.help != SUPPRESS and a.dest not in ("help", "optimizer")}
    settings = {name for names in GROUPS.values() for name in names} if "epochs" in actions else set()
    if own := [action for name, action in actions.items() if name not in settings]:
        yield "arguments", own
    for title, names in GROUPS.items() if settings else ():
        yield title, [actions[name] for name in names]


def _describe(action: Action, columns: int) -> list[str]:
    """A flag with its value, its meaning and its default."""
    hint = getattr(action, "_typehint", None)
    text = " ".join((action.help or "").split())
    if action.dest == "options":
        head = "--options.NAME VALUE"
    elif not action.option_strings:
        head = str(action.metavar)
    elif hint is None or (action.metavar and "{" not in action.metavar):  # jsonargparse writes {a,b}
        head = f"{action.option_strings[0]} {action.metavar or ''}"
    else:
        word = value_word(hint)
        head = f"{action.option_strings[0]} {word}"
        text += f": {', '.join(_choices(hint))}" if word == "NAME" and _choices(hint) else ""
    if hint is not None and action.default not in (None, "") and not isinstance(action.default, dict):
        text += f" ({_show_default(action.default)})"
    lines = textwrap.wrap(text, columns - FLAG_COLUMNS - 2, break_on_hyphens=False)
    if len(head) > FLAG_COLUMNS - 1:
        lines.insert(0, "")
    indent = " " * (FLAG_COLUMNS + 2)
    return [f"  {head:<{FLAG_COLUMNS}}{lines[0]}".rstrip(), *(indent + line for line in lines[1:])]


def _choices(hint: Any) -> list[str]:
    """The values that a setting may have, where it may have few."""
    return [option for option in get_args(hint) if isinstance(option, str)]


def _show_default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
