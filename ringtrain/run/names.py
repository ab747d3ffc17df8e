"""Names of variables in checkpoints: Keras' names without version-specific parts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

UNNAMED = re.compile(r"variable(_\d+)?")


def without_optimizer_names(paths: Sequence[str]) -> list[str]:
    """Remove the optimizer's name, which Keras chooses: the prefix of the variable ``iteration``.

    Wrappers list inner optimizers' names too. Unnamed variables (one of Nadam's) lose Keras' process-wide number.
    """
    prefixes = {path.removesuffix("iteration") for path in paths if path.endswith("/iteration")}
    names = [path.removeprefix(max((p for p in prefixes if path.startswith(p)), key=len, default="")) for path in paths]
    return ["variable" if UNNAMED.fullmatch(name) else name for name in names]


def number_twins(names: Sequence[str]) -> list[str]:
    """Append ``#2``, ``#3`` and so on to duplicates."""
    numbered: dict[str, None] = {}
    for name in names:
        twins = (name if number == 1 else f"{name}#{number}" for number in itertools.count(1))
        numbered[next(twin for twin in twins if twin not in numbered)] = None
    return list(numbered)


def describe_difference(expected: Sequence[str], found: Sequence[str]) -> str:
    missing = [name for name in expected if name not in set(found)]
    extra = [name for name in found if name not in set(expected)]
    parts = []
    for title, names in (("missing", missing), ("not in the model", extra)):
        if names:
            parts.append(f"{title}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}")
    return "; ".join(parts)
