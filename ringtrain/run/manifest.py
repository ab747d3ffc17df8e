"""What a checkpoint's manifest may say: its types and sizes, whoever wrote it and whatever checksum it has."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_BYTES = 32 * 2**20  # about 100,000 variables
MAX_NUMBER = 2**62
MAX_NAME = 4096
DTYPES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


def digest_of(content: Mapping[str, Any]) -> str:
    """The checksum that a manifest states of its content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def require_sound(content: Mapping[str, Any], variables_file: str) -> None:
    """See that a manifest's content has the types that it must have, and that its variables fill their file."""
    _require("format", content.get("format"), lambda value: _is_count(value) and value > 0)
    _require("step", content.get("step"), _is_count)
    for name in ("progress", "run"):
        _require(name, content.get(name), lambda value: isinstance(value, dict))
    files = content.get("files")
    file = files.get(variables_file) if isinstance(files, dict) else None
    _require(variables_file, file, lambda value: isinstance(value, dict) and _is_count(value.get("bytes")))
    digest = file.get("sha256") if file else None
    _require("checksum", digest, lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value))
    variables = content.get("variables")
    _require("list of variables", variables, lambda value: isinstance(value, list))
    end, names = 0, set()
    for item in variables or ():
        _require("variable", item, _is_variable)
        _require(f"place of {item['name'][:80]!r}", item["offset"], lambda offset: offset == end)  # noqa: B023
        _require("name, a second time,", item["name"], lambda name: name not in names)
        names.add(item["name"])
        end += item["bytes"]
    _require("size of all variables", end, lambda size: file is not None and size == file["bytes"])


def _require(what: str, value: Any, rule: Callable[[Any], object]) -> None:
    if not rule(value):
        raise ValueError(f"its {what} is {repr(value)[:80]}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_NUMBER


def _is_variable(item: Any) -> bool:
    """Whether it has a name, a type and a shape, and as many bytes as these take."""
    if not isinstance(item, dict) or not isinstance(item.get("name"), str) or len(item["name"]) > MAX_NAME:
        return False
    dtype, shape = item.get("dtype"), item.get("shape")
    if not isinstance(dtype, str) or dtype not in DTYPES or not isinstance(shape, list) or len(shape) > 32:
        return False
    counts = (item.get("offset"), item.get("bytes"), *shape)
    return all(map(_is_count, counts)) and item["bytes"] == math.prod(shape) * DTYPES[dtype]
