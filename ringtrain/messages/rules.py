"""Checks of settings; a UsageError names setting, value and rule."""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ringtrain.errors import UsageError
from ringtrain.messages.escaping import escape

MAX_FLOAT = 3e38  # float32's largest
LONGEST_VALUE = 80


def list_first(names: Sequence[object], most: int = 1, kind: str = "") -> str:
    """Return for example ``a, b and 3 more``, or ``3 more layers``."""
    more = f" and {len(names) - most} more{f' {kind}' if kind else ''}" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def did_you_mean(name: str, names: Iterable[str], *, prefix: str = "") -> str:
    """Ends with a space; empty if no name is close."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"Did you mean {prefix + near[0]!r}? " if near else ""


def one_of(name: str, value: str, values: Mapping[str, Any] | tuple[str, ...]) -> None:
    if value not in values:
        raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(values)}.")


def at_least(name: str, value: float, least: int, most: float = MAX_FLOAT) -> None:
    _require(name, value, value >= least, f"at least {least}")
    at_most(name, value, most)


def above(name: str, value: float, bound: int, most: float = MAX_FLOAT) -> None:
    _require(name, value, value > bound, f"greater than {bound}")
    at_most(name, value, most)


def _require(name: str, value: float, holds: bool, rule: str) -> None:
    if not (holds and math.isfinite(value)):
        finite = "" if math.isfinite(value) else "a finite number, "
        raise UsageError(f"{name} is {value}; it must be {finite}{rule}.")


def at_most(name: str, value: float, most: float) -> None:
    if value > most:
        limit = f"{most:,}" if isinstance(most, int) else f"{most:g}"
        raise UsageError(f"{name} is {shorten(value)}; it must be at most {limit}.")


def printable(name: str, path: Path | str | None) -> None:
    """Check that TensorFlow, settings, code and a shown command can hold a path."""
    if escape(str(path)) != str(path) or "\t" in str(path):
        rule = "which is not UTF-8 text without control characters"
        raise UsageError(f"{name} is {str(path)!r}, {rule}. Give another path.")


def shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text)} characters)"


def range_of_steps(name: str, value: str) -> None:
    found = re.fullmatch(r"(\d{1,15}):(\d{1,15})", str(value), re.ASCII)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(f"{name} is {value!r}; it must be START:STOP, two steps from 1 on, such as 100:110.")


def count_or_auto(name: str, value: str, most: int) -> None:
    if value != "auto" and not (re.fullmatch(r"[1-9]\d{0,9}", value, re.ASCII) and int(value) <= most):
        raise UsageError(f"{name} is {shorten(value)}; it must be auto or a whole number from 1 to {most:,}.")


def merge_options(explicit: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(declared)
    for name, value in explicit.items():
        if name not in declared:
            raise UsageError(
                f"the workload has no option {name!r}. {did_you_mean(name, declared)}"
                f"Its options: {', '.join(sorted(declared)) or 'none'}."
            )
        merged[name] = as_declared(f"options.{name}", value, declared[name])
    return merged


def as_declared(name: str, value: Any, default: Any) -> Any:
    """Check the type of the default; None allows any."""
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if default is not None and type(value) is not type(default):
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
        rule = words.get(type(default), f"a {type(default).__name__}")
        raise UsageError(f"{name} is {value!r}; it must be {rule}, such as {default!r}.")
    return value


def check_types(settings: Any, prefix: str = "") -> None:
    """Call it for values that no parser has checked, such as a workload's defaults."""
    for name, hint in _read_hints(type(settings)).items():  # type: ignore[arg-type]
        value, (kind, may_be_none) = getattr(settings, name), kind_of(hint)
        if getattr(value, "shape", None) == () and hasattr(value, "item"):  # NumPy scalar
            value = value.item()
            object.__setattr__(settings, name, value)
        if value is None and may_be_none:
            continue
        kinds = (int, float) if kind is float else kind
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
            raise UsageError(f"{prefix}{name} is {shorten(repr(value))}; it must be {rule_of(hint)}.")
        if get_origin(hint) is Literal:
            one_of(f"{prefix}{name}", str(value), get_args(hint))


@functools.cache
def _read_hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)  # it takes milliseconds


def rule_of(hint: Any) -> str:
    if choices := [option for option in get_args(hint) if isinstance(option, str)]:
        return f"one of {', '.join(choices)}"
    words = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
    words[str] = "a text (in a YAML file put it in quotes)"  # YAML reads 20:25 as 1225, base 60
    words[Mapping] = "a mapping; write --options.NAME VALUE"
    return words.get(kind_of(hint)[0], "a mapping")


def kind_of(hint: Any) -> tuple[type, bool]:
    """Return a field's type, and if it may be None."""
    if get_origin(hint) is dict:
        return Mapping, False
    options = get_args(hint)
    if options and isinstance(options[0], str):
        return str, False
    return (options[0] if options else hint), type(None) in options
