"""Models with their data, loss, metrics and default settings: built in, or user-defined in a file or package."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringtrain.errors import UsageError
from ringtrain.messages.rules import did_you_mean
from ringtrain.workloads.base import Workload

BUILT_IN = {
    "autoencoder": "ringtrain.workloads.autoencoder:Autoencoder",
    "cifar10": "ringtrain.workloads.cifar10:Cifar10",
    "cifar10_resnet": "ringtrain.workloads.cifar10_resnet:Cifar10Resnet",
    "digits": "ringtrain.workloads.digits:Digits",
    "inception": "ringtrain.workloads.inception:Inception",
    "polynomial": "ringtrain.workloads.polynomial:Polynomial",
}

PYTHON_FUNCTIONS = ("py_function", "numpy_function", "py_func")

IMPORTED = ("horovod", "keras", "launch", "mpi4py", "numpy", "ringtrain", "tensorflow", "yaml")


def check_workload_name(spec: str) -> None:
    """Check ``package.module:Class``, ``path/file.py:Class``, ``path/file.py`` or a built-in name, unimported."""
    if spec in BUILT_IN:
        return
    place, class_name = _split(spec)
    if not place and "." not in spec and "/" not in spec:
        raise UsageError(
            f"there is no workload {spec!r}. {did_you_mean(spec, BUILT_IN)}"
            f"Built in: {', '.join(sorted(BUILT_IN))}. Your own: path/file.py or package.module:Class."
        )
    if not place or not (class_name.isidentifier() or spec.endswith(".py")):
        raise UsageError(
            f"workload is {spec!r}; name a file, path/file.py or path/file.py:Class, or a class, package.module:Class."
        )
    if place.endswith(".py") and not os.path.isfile(place):  # Path.is_file raises if the name is too long
        raise UsageError(f"workload is {spec!r}, but there is no file {place!r}. Check the path.", reach="node")
    refuse_hiding(Path(place))


def refuse_hiding(file: Path, *, is_new: bool = False) -> None:
    """Refuse a file that would shadow a module used in training; if new, any installed module."""
    elsewhere = [place for place in sys.path if Path(place).resolve() != file.parent.resolve()]
    is_taken = is_new and importlib.machinery.PathFinder.find_spec(file.stem, elsewhere) is not None
    if file.suffix == ".py" and (file.stem in IMPORTED or is_taken):
        raise UsageError(
            f"{str(file)!r} would be imported in place of {file.stem}, which training needs. Give the file another "
            f"name, such as my_{file.name}."
        )


def is_file_within(spec: str, directory: Path) -> bool:
    """Follow links."""
    place, _ = _split(spec)
    return place.endswith(".py") and Path(place).resolve().is_relative_to(directory.resolve())


def load_workload(spec: str) -> type[Workload]:
    """Import a class. User files may import TensorFlow: pin the devices before."""
    check_workload_name(spec)
    place, class_name = _split(BUILT_IN.get(spec, spec))
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # user modules may raise anything
        raise UsageError(f"workload {spec!r} cannot be imported: {_describe(error)}.") from error
    workload = getattr(module, class_name or _only_workload(module, spec), None)
    if not (isinstance(workload, type) and issubclass(workload, Workload)):
        own = ", ".join(_workloads_in(module)) or "none"
        raise UsageError(f"{place!r} has no class {class_name!r} derived from ringtrain.Workload; it has: {own}.")
    missing = sorted(getattr(workload, "__abstractmethods__", ()))
    if missing:
        raise UsageError(f"{spec!r} lacks {', '.join(missing)}: see ringtrain/workloads/base.py.")
    for name in ("defaults", "options"):
        settings = getattr(workload, name)
        is_named = isinstance(settings, Mapping) and all(isinstance(key, str) for key in settings)
        if not is_named or (name == "options" and not all(map(_is_plain, settings.values()))):
            raise UsageError(
                f"{workload.__name__}.{name} is {settings!r}; it must be a mapping of names to plain values "
                "(numbers, texts, true or false, lists and mappings of them), such as {'epochs': 5}."
            )
    return workload


def create_workload(workload_class: type[Workload], options: Mapping[str, Any]) -> Workload:
    """Set ``options`` before ``__init__``, which can read them."""
    workload = workload_class.__new__(workload_class)
    vars(workload)["options"] = options
    try:
        workload.__init__()  # type: ignore[misc]
    except UsageError:
        raise
    except Exception as error:  # user code may raise anything
        raise UsageError(
            f"{workload_class.__name__}() cannot be made: {_describe(error)}. It is called without arguments; what the "
            "user may set belongs into options, and is in self.options."
        ) from error
    return workload


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _describe(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if isinstance(error, SyntaxError) else f" ({frame.filename}, line {frame.lineno})"
    return f"{type(error).__name__}: {error}{where}"


def names_python_functions(workload_class: type[Workload]) -> bool:
    """True if its source names functions that call Python code in a step."""
    modules = (sys.modules.get(each.__module__) for each in workload_class.__mro__)
    paths = {Path(getattr(module, "__file__", None) or "") for module in modules}
    sources = [path.read_text(errors="replace") for path in paths if path.suffix == ".py" and path.is_file()]
    return any(name in source for source in sources for name in PYTHON_FUNCTIONS)


def _split(spec: str) -> tuple[str, str]:
    if spec.endswith(".py"):
        return spec, ""
    place, _, class_name = spec.rpartition(":")
    return place, class_name


def _workloads_in(module: object) -> list[str]:
    """Include imported classes."""
    classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    return [name for name, value in classes.items() if issubclass(value, Workload) and value is not Workload]


def _only_workload(module: object, spec: str) -> str:
    own = [name for name in _workloads_in(module) if vars(module)[name].__module__ == vars(module)["__name__"]]
    if not own:
        raise UsageError(
            f"workload is {spec!r}, a file without a workload: write a class derived from ringtrain.Workload in it, or "
            "begin with python -m ringtrain init."
        )
    if len(own) > 1:
        raise UsageError(
            f"workload is {spec!r}, a file with the workloads {', '.join(own)}; name one, as in {spec}:{own[0]}."
        )
    return own[0]


def _import_file(path: Path) -> object:
    name = f"ringtrain_user_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # as for regular imports
    module_spec.loader.exec_module(module)
    return module
