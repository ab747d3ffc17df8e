"""Job arrays: one run for each combination of settings."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ringtrain.config import Config
from ringtrain.errors import UsageError

from .job import MAX_NUMBER, read_flag

RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)", re.ASCII)
COMMA = re.compile(r",(?![^\[{]*[\]}])")  # outside lists and mappings
NOT_IN_NAMES = re.compile(r"[^\w.=,+-]+")


class Member(NamedTuple):
    settings: tuple[tuple[str, str], ...]
    out: str

    @property
    def flags(self) -> tuple[str, ...]:
        named = dict(self.settings) | {"out": self.out}
        return tuple(f"--{name}={value}" for name, value in named.items())

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings)


def read_members(array: str, flags: Sequence[str]) -> tuple[Member, ...]:
    """Read a grid such as ``optimizer.lr=0.1,0.01 seed=1..5``, or a file with one on each line. Raise UsageError."""
    lines = [array] if "=" in array else read_file(array)
    workload = read_flag(flags, "workload") or Config.workload
    parent = read_flag(flags, "out") or f"runs/{workload.rpartition(':')[2].lower()}"
    grids = [grid for line in lines if (grid := read_grid(line))]
    num_members = sum(math.prod(map(len, grid.values())) for grid in grids)
    if not 0 < num_members <= MAX_NUMBER:
        raise UsageError(f"array is {array!r}, {num_members:,} runs; it must be between 1 and {MAX_NUMBER:,}.")
    members: dict[Path, Member] = {}  # by their directories
    for grid in grids:
        for values in itertools.product(*grid.values()):
            settings = tuple(zip(grid, values, strict=True))
            name = ",".join(f"{name.rpartition('.')[2]}={value}" for name, value in settings)
            member = Member(settings, dict(settings).get("out") or f"{parent}/{NOT_IN_NAMES.sub('_', name)}")
            other = members.setdefault(Path(member.out), member)
            if other is not member:
                raise UsageError(
                    f"two runs of the array would share the directory {member.out!r}: '{other}' and '{member}'. Leave "
                    "out the second one, or give each its own out=DIRECTORY."
                )
    return tuple(members.values())


def read_file(name: str) -> list[str]:
    try:
        return Path(name).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(
            f"array is {name!r}, a file that cannot be read: {why}. Name a file with settings on each line, or give "
            'them, as in --array "optimizer.lr=0.1,0.01 seed=1..5".'
        ) from None


def read_grid(line: str) -> dict[str, list[str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"array has the line {line!r}: {error}. Close the quotation mark.") from None
    grid: dict[str, list[str]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        name = name.removeprefix("--")
        if not equals or not name or not values:
            raise UsageError(f"array has {word!r}; it must be NAME=VALUE,VALUE or NAME=FIRST..LAST, such as seed=1..5.")
        if name in grid:
            raise UsageError(f"array sets {name} twice in one line. Give all its values after one {name}=.")
        grid[name] = list(itertools.chain.from_iterable(map(expand, COMMA.split(values))))
    return grid


def expand(value: str) -> Iterable[str]:
    match = RANGE.fullmatch(value)
    if match is None:
        return [value]
    first, last = int(match[1]), int(match[2])
    if not first <= last < first + MAX_NUMBER:
        raise UsageError(f"array has the range {value!r}; it must go upwards, with at most {MAX_NUMBER:,} numbers.")
    return map(str, range(first, last + 1))
