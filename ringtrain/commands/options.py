"""What a command takes: the fields of its dataclass, each with the docstring below it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from typing import Any, NamedTuple, get_type_hints


class Option(NamedTuple):
    """A field of a command's dataclass: a word where it is positional, else a flag.

    Attributes:
        name: the field's own, after that of the group that it is in, such as ``optimizer.lr``.
        hint: the type of its values; of a tuple's, where it takes all words that are left.
        default: its value where none is given; ``dataclasses.MISSING`` where one must be.
        is_word: its value stands by itself, at its place.
    """

    name: str
    hint: Any
    default: Any
    is_word: bool


def find_options(command: type, group: str = "") -> dict[str, Option]:
    """The options of a command by name; a field that is a dataclass is a group, whose name stands before theirs."""
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
    """The docstrings of the options by name, as they stand in the source."""
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
