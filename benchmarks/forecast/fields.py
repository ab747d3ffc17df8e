"""The fields that a forecast reads from files and flags: type, range, and if a field must be there.

Files come from anybody. Each value is checked before it is used, and a wrong one is named with its
file, its field and the rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ringtrain.errors import RingtrainError
from ringtrain.messages.rules import did_you_mean, shorten

MAX_STEP = 2**53
MAX_SAMPLES = 10**12
MAX_SECONDS = 10**7
MAX_PARAMETERS = 10**13
MAX_VARIABLES = 10_000  # the groups of many more take minutes to plan
MAX_DIMENSIONS = 32
MAX_LISTED_RANKS = 2000  # a start record lists no more
DEVICE_NAME = re.compile(r"CPU|GPU:\d{1,4}", re.ASCII)


class Rule(Protocol):
    """A type and a range; as text it completes "it must be"."""

    def accepts(self, value: Any) -> bool:
        """Return True for a value that may be used."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number in a range."""

    least: float
    most: float
    is_whole: bool = False
    hint: str = ""
    """usual values, and units"""

    def accepts(self, value: Any) -> bool:
        kinds = (int,) if self.is_whole else (int, float)
        return type(value) in kinds and self.least <= value <= self.most  # NaN is in no range

    def __str__(self) -> str:
        kind = "a whole number" if self.is_whole else "a number"
        hint = f", {self.hint}" if self.hint else ""
        return f"{kind} from {self.least:,} to {self.most:,}{hint}"


@dataclass(frozen=True)
class Choice:
    """One of some words."""

    words: tuple[str, ...]

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.words

    def __str__(self) -> str:
        return f"one of {', '.join(self.words)}"


class TrueOrFalse:
    """A boolean."""

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


class Text:
    """A text."""

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str)

    def __str__(self) -> str:
        return "a text"


class Shapes:
    """Shapes of the trainable variables."""

    def accepts(self, value: Any) -> bool:
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_VARIABLES:
            return False
        num_parameters = 0
        for shape in value:
            num_values = _count_values(shape)
            if num_values is None:
                return False
            num_parameters += num_values
        return num_parameters <= MAX_PARAMETERS

    def __str__(self) -> str:
        return (
            f"a list of 1 to {MAX_VARIABLES:,} shapes, each a list of whole numbers from 1 on, of "
            f"{MAX_PARAMETERS:,} parameters at most"
        )


def _count_values(shape: Any) -> int | None:
    """Return the number of values of a variable; None if it is no shape, or larger than allowed."""
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        return None
    num_values = 1
    for length in shape:
        if type(length) is not int or length < 1:
            return None
        num_values *= length
        if num_values > MAX_PARAMETERS:
            return None
    return num_values


class Ranks:
    """The node and the device of each rank."""

    def accepts(self, value: Any) -> bool:
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_LISTED_RANKS:
            return False
        return all(_is_rank(rank) for rank in value)

    def __str__(self) -> str:
        return (
            f"a list of 1 to {MAX_LISTED_RANKS:,} ranks, each with the name of its node as node, "
            "and CPU or GPU:NUMBER as device"
        )


def _is_rank(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("node"), str):
        return False
    device = value.get("device")
    return isinstance(device, str) and DEVICE_NAME.fullmatch(device) is not None


class Field(NamedTuple):
    """A row of a table of fields."""

    rule: Rule
    is_required: bool = True


Table = Mapping[str, Field]


@dataclass(frozen=True, kw_only=True)
class Source:
    """The origin of values, for messages about wrong ones."""

    name: str
    """such as ``'runs/digits/metrics.jsonl', line 7, event train``; empty for flags"""

    remedy: str = ""
    """a sentence that says what to do"""

    error: type[RingtrainError]

    def refuse(self, fault: str) -> RingtrainError:
        """Return the error for a fault, which is a clause without a full stop."""
        where = f"{self.name}: " if self.name else ""
        remedy = f" {self.remedy}" if self.remedy else ""
        return self.error(f"{where}{fault}.{remedy}")


def read_fields(table: Table, values: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return the values of all fields of a table; None for an optional one that is not there.

    Raises the source's error for a wrong or missing value. Other values are left out.
    """
    fields: dict[str, Any] = {}
    for name, (rule, is_required) in table.items():
        value = values.get(name)
        if value is None and not is_required:
            fields[name] = None
        elif name not in values:
            raise source.refuse(f"{name} is missing; it must be {rule}")
        elif not rule.accepts(value):
            raise source.refuse(f"{name} is {show(value)}; it must be {rule}")
        else:
            fields[name] = value
    return fields


def refuse_other_fields(table: Table, values: Mapping[str, Any], source: Source) -> None:
    """Raise the source's error if a value belongs to no field."""
    for name in values:
        if name not in table:
            suggestion = did_you_mean(name, table)
            known = f"{suggestion}Fields: {', '.join(table)}"
            raise source.refuse(f"{shorten(repr(name))} is no field of a cluster. {known}")


def show(value: Any) -> str:
    """Return a value as text of limited length."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of thousands of digits
        return "a value with thousands of digits"
    return shorten(text)
