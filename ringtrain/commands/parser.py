"""Parse words, flags and YAML into the options of a command."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ringtrain.commands.help import find_options, show_help
from ringtrain.errors import UsageError
from ringtrain.messages.removed import refuse_removed, without_removed
from ringtrain.messages.rules import kind_of, rule_of, shorten
from ringtrain.runtime.run_record import record_exit
from ringtrain.runtime.world import World

NOTHING = (None, "null", "~")  # unset an optional setting
MAX_DIGITS = 4300  # Python's limit for int


def parse_arguments(command: type, arguments: Sequence[str], world: World) -> dict[str, Any]:
    """Return options by name, groups as mappings; the last value counts. A boolean flag may have no value."""
    if {"-h", "--help"} & set(arguments):
        if world.is_rank0:
            print(show_help(command), end="")
        record_exit()
        raise SystemExit(0)
    reader, rest, words = _Reader(command), list(arguments), list[str]()
    while rest:
        word = rest.pop(0)
        if word == "--":
            words, rest = words + rest, []
        elif word == "-" or not word.startswith("-"):
            words.append(word)
        else:
            flag, has_value, value = word.partition("=")
            if not has_value and rest and not rest[0].startswith("--"):
                has_value, value = "=", rest.pop(0)
            reader.take_flag(flag, value if has_value else None)
    reader.take_words(words)
    return reader.result()


def parse_mapping(command: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    reader = _Reader(command)
    for name, value in settings.items():
        reader.take(name, value)
    return reader.result()


class _Reader:
    def __init__(self, command: type) -> None:
        self._options = find_options(command)
        self._given: dict[str, Any] = {}

    def take_flag(self, flag: str, value: str | None) -> None:
        """For ``--config``, also take the file's settings."""
        name = flag.removeprefix("--")
        if value is None and name in self._options and self._options[name].hint is not bool:
            raise UsageError(f"{name} is given no value; put one behind {flag}. See --help.")
        self.take(name, "true" if value is None else value, flag=flag)
        if name == "config" and value:
            del self._given[name]
            for key, inner in without_removed(_load_file(value), value).items():
                self.take(key, inner, place=f" in {value}")

    def take(self, name: str, value: Any, *, flag: str = "", place: str = "") -> None:
        parent, _, last = name.partition(".")
        if name in self._options and not self._options[name].is_word:
            self._given[name] = _convert(name, value, self._options[name].hint, place)
        elif last and parent in self._options and get_origin(self._options[parent].hint) is dict:
            self._given[parent] = {**(self._given.get(parent) or {}), last: parse_text(value)}
        elif any(known.startswith(f"{name}.") for known in self._options):
            members = {} if value is None else parse_text(value)
            if not isinstance(members, Mapping):
                rule = "it must be a mapping of settings, such as {name: adam}"
                raise UsageError(f"{name} is {shorten(repr(value))}; {rule}.")
            for key, inner in members.items():
                self.take(f"{name}.{key}", inner, place=place)
        else:
            refuse_removed(name, title=flag or f"the setting {name}")
            names = [known for known, option in self._options.items() if not option.is_word]
            near = [known for known in names if known.endswith(f".{name}")] or difflib.get_close_matches(name, names, 1)
            suggestion = f"Did you mean {'--' if flag else ''}{near[0]}? " if near else ""
            what = f"flag {flag}" if flag else f"key {name}"
            raise UsageError(f"there is no {what}. {suggestion}See --help.")

    def take_words(self, words: Sequence[str]) -> None:
        rest = list(words)
        for name, hint in [(option.name, option.hint) for option in self._options.values() if option.is_word]:
            if get_origin(hint) is tuple and rest:
                self._given[name] = tuple(_convert(name, word, get_args(hint)[0]) for word in rest)
                rest = []
            elif rest:
                self._given[name] = _convert(name, rest.pop(0), hint)
        if rest:
            raise UsageError(f"{rest[0]!r} belongs to no flag. See --help.")
        needed = [name for name, option in self._options.items() if option.default is dataclasses.MISSING]
        if missing := [name for name in needed if name not in self._given]:
            raise UsageError(f"{', '.join(missing)} must be given. See --help.")

    def result(self) -> dict[str, Any]:
        """Settings given as null have their defaults."""
        result: dict[str, Any] = {}
        for name, value in self._given.items():
            if value is not None:
                group, _, last = name.rpartition(".")
                (result.setdefault(group, {}) if group else result)[last] = value
        return result


def _convert(name: str, value: Any, hint: Any, place: str = "") -> Any:
    """Convert a string or YAML value to its field's type; None if unset."""
    kind, may_be_none = kind_of(hint)
    if value is None or (may_be_none and value in NOTHING):
        return None
    if value == "":
        raise UsageError(f"{name} is ''{place}; give it a value, or leave it out.")
    read = parse_text(value) if kind not in (str, Path) else value
    if isinstance(read, bool) and str(read).lower() in get_args(hint):  # YAML boolean for a setting with a third choice
        return str(read).lower()
    if kind is Mapping and isinstance(read, Mapping):
        return {str(key): parse_text(inner) for key, inner in read.items()}
    if kind is Path and isinstance(read, str) and "\0" not in read:
        return Path(read)
    if kind is float and type(read) is int and abs(read) < 10**300:
        return float(read)
    if (
        not isinstance(read, kind)
        or (isinstance(read, bool) and kind is not bool)
        or (get_origin(hint) is Literal and read not in get_args(hint))
    ):
        is_endless = isinstance(value, str) and value.isdigit() and len(value) > MAX_DIGITS
        found = "has thousands of digits" if is_endless else f"is {shorten(repr(str(value)))}"
        raise UsageError(f"{name} {found}; it must be {rule_of(hint)}.")
    return read


def parse_text(value: Any) -> Any:
    """Parse a string as YAML: a number, true, false, null, "a text", [a, list] or {a: mapping}; else return it."""
    if not isinstance(value, str):
        return value
    try:
        # YAML reads 010 as octal.
        read = int(value) if value.removeprefix("-").isdigit() else _load_word(value)
    except (ValueError, RecursionError):
        return value
    is_plain = isinstance(read, int | float) or value in NOTHING or value.startswith(("[", "{", "'", '"'))
    return read if is_plain else value


def _load_word(text: str) -> Any:
    """Raise ValueError if it is no YAML."""
    import yaml  # late: doctor must run without PyYAML

    try:
        return _word_loader()(text).get_single_data()
    except yaml.YAMLError:
        raise ValueError from None


@functools.cache
def _word_loader() -> Any:
    """Plain YAML; 1e-3 and -.5 are numbers, dates are strings, and aliases, anchors and tags are refused."""
    import yaml

    class Loader(yaml.SafeLoader):
        def fetch_alias(self) -> None:
            raise yaml.YAMLError

        fetch_anchor = fetch_tag = fetch_alias

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    number = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def _load_file(file: str) -> Mapping[str, Any]:
    import yaml

    from ringtrain.run.directory import CONFIG_FILE, load_settings  # imported late: loads NumPy

    try:
        settings = load_settings(Path(file), follows_links=True)
    except (ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise UsageError(f"{file} holds no settings: {why}.") from None
    except OSError as error:
        reasons: dict[type[OSError], str] = {
            FileNotFoundError: "it does not exist. Check the path",
            IsADirectoryError: f"that is a directory. Name a YAML file, such as the {CONFIG_FILE} of a run",
        }
        reason = reasons.get(type(error), f"it cannot be read: {error.strerror}. Check the path")
        raise UsageError(f"config is {file!r}, and {reason}.") from None
    if not isinstance(settings, Mapping):
        what = "is empty" if settings is None else "holds no mapping"
        raise UsageError(f"{file} {what}; it must hold settings, such as epochs: 5.")
    if "config" in settings:
        raise UsageError(f"{file} has the key config; a file of settings cannot name another one.")
    return settings
