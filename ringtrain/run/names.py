"""Names of variables in checkpoints: Keras' names, without the parts that differ between its versions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

UNNAMED = re.compile(r"variable(_\d+)?")


def without_optimizer_names(paths: Sequence[str]) -> list[str]:
    """The paths of an optimizer's variables without the name of the optimizer, which Keras chooses.

    Each optimizer counts its updates in a variable ``iteration``: what stands before that is its name. An optimizer
    that holds others has theirs among its own. A variable that the optimizer does not name (one of Nadam's) Keras calls
    ``variable``, with the number that the process had made before: it goes without.
    """
    prefixes = {path.removesuffix("iteration") for path in paths if path.endswith("/iteration")}
    names = [path.removeprefix(max((p for p in prefixes if path.startswith(p)), key=len, default="")) for path in paths]
    return ["variable" if UNNAMED.fullmatch(name) else name for name in names]


def number_twins(names: Sequence[str]) -> list[str]:
    """The names, of which the second and further ones of a name have ``#2`` and so on behind them."""
    numbered: dict[str, None] = {}
    for name in names:
        twins = (name if number == 1 else f"{name}#{number}" for number in itertools.count(1))
        numbered[next(twin for twin in twins if twin not in numbered)] = None
    return list(numbered)


def describe_difference(expected: Sequence[str], found: Sequence[str]) -> str:
    """List the names that are on one side only."""
    missing = [name for name in expected if name not in set(found)]
    extra = [name for name in found if name not in set(expected)]
    parts = []
    for title, names in (("missing", missing), ("not in the model", extra)):
        if names:
            parts.append(f"{title}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}")
    return "; ".join(parts)
