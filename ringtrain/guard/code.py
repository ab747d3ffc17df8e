"""Loaded user code, for comparison: neither Python nor installed packages.

Modules that only some ranks have loaded, such as plots on rank 0, are no difference.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ringtrain.messages.defects import INSTALLED, is_users_own

PACKAGES = ("ringtrain", "tensorflow", "keras", "horovod", "mpi4py", "numpy")


def describe_loaded_code() -> dict[str, str | list[str]]:
    """Lines of user modules, and versions of their packages, by import name: paths may differ."""
    facts: dict[str, str | list[str]] = {}
    versions: dict[str, str] = {}
    seen = set()  # multiprocessing can give the program several names
    for name, module in sorted(sys.modules.items()):
        file = _file_of(module)
        if file is None or file in seen or not is_users_own(file):
            continue
        seen.add(file)
        lines = _read_lines(name, module, file)
        if lines is not None:
            depth = name.count(".") + 1 + (Path(file).stem == "__init__")
            label = "/".join(Path(file).parts[-depth:])  # nets/blocks.py for nets.blocks
            if f"{label} line" in facts:
                label = f"{Path(file).parent.name}/{label}"
            facts[f"{label} line"] = lines
        versions |= dict(_packages_in(module))
    return facts | dict(sorted(versions.items()))


def package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _file_of(module: object) -> str | None:
    """Avoid ``getattr``, which would load lazy modules."""
    return vars(module).get("__file__") if isinstance(module, ModuleType) else None


def _read_lines(name: str, module: ModuleType, file: str) -> list[str] | None:
    path = Path(file)
    if path.suffix == ".py" and path.is_file():
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    spec = getattr(module, "__spec__", None)
    loader: Any = getattr(spec, "loader", None) or getattr(module, "__loader__", None)
    try:
        source = loader.get_source(spec.name if spec else name)
    except (AttributeError, ImportError, OSError, SyntaxError, UnicodeDecodeError):
        return None
    return None if source is None else str(source).splitlines()


def _packages_in(module: ModuleType) -> Iterator[tuple[str, str]]:
    for value in list(vars(module).values()):
        if isinstance(value, ModuleType):
            origin = vars(value).get("__name__")
        else:
            origin = value.__module__ if isinstance(value, (type, FunctionType)) else None
        name = str(origin).partition(".")[0]
        file = _file_of(sys.modules.get(name))
        if name in PACKAGES or file is None or is_users_own(file) or not any(folder in file for folder in INSTALLED):
            continue
        version = package_version(name) or vars(sys.modules[name]).get("__version__")  # yaml is in PyYAML
        if isinstance(version, str):
            yield name, version
