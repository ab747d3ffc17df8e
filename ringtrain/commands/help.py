"""Options of a command, from its dataclass's fields and docstrings, and the ``--help`` texts."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import inspect
import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from ringtrain.config import OptimizerConfig
from ringtrain.messages.rules import kind_of

PROGRAM = "python -m ringtrain"
MAX_COLUMNS = 100
FLAG_COLUMNS = 27
LONGEST_CHOICE = 20  # characters of a|b|c; longer ones are listed in the text

OVERVIEW = f"""\
usage: {PROGRAM} [COMMAND] [ARGUMENTS]

Train TensorFlow/Keras models on many GPUs or cores, one process each, which a
launcher starts. The default command is train.

commands:
{{commands}}

examples:
  horovodrun -np 2 {PROGRAM}
  horovodrun -np 2 {PROGRAM} --workload cifar10 --data_dir data
  {PROGRAM} init my_workload.py

Each command's flags and examples: {PROGRAM} COMMAND --help
"""

# Settings by group; a test checks that each is in one.
GROUPS: Mapping[str, Sequence[str]] = {
    "run": (
        "workload", "options", "epochs", "steps", "batch_size", "global_batch_size", "out", "resume", "init_from",
        "seed", "config", "print_config",
    ),
    "data": ("data_dir", "synthetic"),
    "evaluation and saving": (
        "log_every", "profile", "eval_every_epochs", "eval_every", "best_metric", "best_direction", "stop_after",
        "checkpoint_every", "keep", "max_hours", "copy_to", "tracker",
    ),
    "optimizer": tuple(f"optimizer.{field.name}" for field in dataclasses.fields(OptimizerConfig)),
    "computing and communication": (
        "precision", "accumulate", "jit_compile", "compression", "shard_optimizer", "backend", "steps_per_call",
        "deterministic",
    ),
    "guards": ("on_nonfinite", "check_replicas_every", "hang_timeout", "exit_timeout", "detached"),
}  # fmt: skip


class Option(NamedTuple):
    name: str  # with its group, such as optimizer.lr
    hint: Any  # for a tuple of words, the tuple's
    default: Any  # MISSING if required
    is_word: bool


@functools.cache
def find_options(command: type, group: str = "") -> dict[str, Option]:
    """Nested dataclasses are groups, with a prefix in the names."""
    hints, found = get_type_hints(command), dict[str, Option]()
    for field in dataclasses.fields(command):
        name, hint = group + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            found |= find_options(hint, f"{name}.")  # type: ignore[arg-type]
        else:
            default = field.default if field.default_factory is dataclasses.MISSING else None
            found[name] = Option(name, hint, default, is_word=not field.kw_only)
    return found


def read_texts(command: type, group: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for part in filter(dataclasses.is_dataclass, command.__mro__):
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in itertools.pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(field.target, ast.Name):
                found[group + field.target.id] = " ".join(ast.literal_eval(text.value).split())
    for name, hint in get_type_hints(command).items():
        if dataclasses.is_dataclass(hint):
            found |= read_texts(hint, f"{group}{name}.")  # type: ignore[arg-type]
    return found


def show_overview(commands: Mapping[str, str]) -> str:
    """Modules are parsed, not imported: some imports are slow."""
    lines = []
    for name, module in commands.items():
        spec = importlib.util.find_spec(module)
        source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
        lines.append(f"  {name:<11}{(ast.get_docstring(ast.parse(source)) or '').partition(chr(10))[0]}")
    return OVERVIEW.format(commands="\n".join(lines))


def show_help(command: type) -> str:
    module, options, texts = sys.modules[command.__module__], find_options(command), read_texts(command)
    columns = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    package, _, name = (module.__spec__.name if module.__spec__ else module.__name__).rpartition(".")
    program = f"python -m {package}" if name == "__main__" else f"{PROGRAM} {name}"
    words = [_place_of(option) for option in options.values() if option.is_word]
    flags = [] if all(option.is_word for option in options.values()) else ["[--NAME VALUE ...]"]
    *purpose, examples = (inspect.getdoc(module) or "").split("\n\n")
    parts = [
        " ".join([f"usage: {program}", *words, *flags]),
        textwrap.fill(" ".join(purpose), columns),
        f"examples:\n{textwrap.indent(textwrap.dedent(examples), '  ')}",
    ]
    for title, group in _grouped(options):
        lines = [line for option in group for line in _describe(option, texts[option.name], columns)]
        parts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(parts) + "\n"


def _place_of(option: Option) -> str:
    """RUN, [FILE], or RUN [RUN ...]."""
    word = option.name.upper()
    if get_origin(option.hint) is tuple:
        return f"{word.removesuffix('S')} [{word.removesuffix('S')} ...]"
    return word if option.default is dataclasses.MISSING else f"[{word}]"


def _grouped(options: Mapping[str, Option]) -> Iterator[tuple[str, list[Option]]]:
    settings = {name for names in GROUPS.values() for name in names} if "epochs" in options else set()
    if own := [option for name, option in options.items() if name not in settings]:
        yield "arguments", sorted(own, key=lambda option: not option.is_word)
    for title, names in GROUPS.items() if settings else ():
        yield title, [options[name] for name in names if name in options]


def _describe(option: Option, text: str, columns: int) -> list[str]:
    choices = "|".join(get_args(option.hint)) if get_origin(option.hint) is Literal else ""
    kinds = {int: "N", float: "X", bool: "true|false", str: "NAME"}
    value = choices if 0 < len(choices) <= LONGEST_CHOICE else kinds.get(kind_of(option.hint)[0], "PATH")
    head = f"--{option.name} {value}"
    if option.is_word:
        head = option.name.upper().removesuffix("S")
    elif get_origin(option.hint) is dict:
        head = f"--{option.name}.NAME VALUE"
    elif len(choices) > LONGEST_CHOICE:
        text += f": {', '.join(get_args(option.hint))}"
    if (default := option.default) not in (None, "", dataclasses.MISSING):
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        text += f" ({shown.lower() if isinstance(default, bool) else shown})"
    lines = textwrap.wrap(text, columns - FLAG_COLUMNS - 2, break_on_hyphens=False)
    if len(head) > FLAG_COLUMNS - 1:
        lines.insert(0, "")
    indent = " " * (FLAG_COLUMNS + 2)
    return [f"  {head:<{FLAG_COLUMNS}}{lines[0]}".rstrip(), *(indent + line for line in lines[1:])]
