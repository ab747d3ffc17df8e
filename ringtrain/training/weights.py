"""First weights from a checkpoint, a Keras file or safetensors, by name."""

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import h5py
import keras
import ml_dtypes
import numpy.typing as npt

from ringtrain.errors import DataError, UsageError
from ringtrain.files.bounded import open_regular
from ringtrain.messages.defects import describe_defect
from ringtrain.run.checkpoint import read_checkpoint
from ringtrain.run.store import find_checkpoint
from ringtrain.run.variables import slots_that_begin_as_weights
from ringtrain.runtime.private import all_layers
from ringtrain.training.job import Job

KIND = "weights/"
# Loads only what is used, so that its shape is checked before.
Loaders = dict[str, tuple[tuple[int, ...], Callable[[], npt.NDArray[Any]]]]


def take_weights(job: Job, source: Path) -> list[str]:
    """Set the variables that match by name and shape; return log lines. Raise DataError, UsageError."""
    weights = {name: v for name, v in job.step.named_variables.items() if name.startswith(KIND)}
    with opening(source, job.step.model, weights) as (path, saved):
        taken = [name for name, v in weights.items() if name in saved and saved[name][0] == tuple(v.shape)]
        if not taken:
            raise UsageError(
                f"init_from {str(path)!r} has no variable of this model's names and shapes; it holds "
                f"{', '.join(map(_short, saved)) or 'none'}."
            )
        for name in taken:
            weights[name].assign(saved[name][1]())
    for weight, copy in (*job.step.averages.pairs, *slots_that_begin_as_weights(job.step.optimizer)):
        copy.assign(weight.value)
    lines = [f"init_from {path}: {len(taken)} of {len(weights)} variables taken"]
    for name, variable in weights.items():
        if name not in taken:
            other = f"of shape {list(saved[name][0])} there" if name in saved else "not there"
            lines.append(f"  new: {_short(name)} {list(variable.shape)}, {other}")
    unused = [_short(name) for name in saved if name not in weights]
    return [*lines, *([f"  not used: {', '.join(unused)}"] if unused else [])]


@contextlib.contextmanager
def opening(source: Path, model: keras.Model, weights: Mapping[str, keras.Variable]) -> Iterator[tuple[Path, Loaders]]:
    if source.is_dir():
        path = find_checkpoint(source)
        variables = read_checkpoint(path).variables
        yield path, {name: (value.shape, value.copy) for name, value in variables.items() if name.startswith(KIND)}
    else:
        try:
            with open_regular(source, follows_links=True) as file, READERS[source.suffix](file) as saved:
                yield source, name_as_in_model(saved, model, weights) if source.suffix != ".safetensors" else saved
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise DataError(f"init_from {str(source)!r} cannot be read: {describe_defect(error)}") from None


@contextlib.contextmanager
def read_h5(file: IO[bytes]) -> Iterator[Loaders]:
    """Yield variables by the names of their layers and their number there, such as ``weights/inner/dense/0``."""
    with h5py.File(file) as opened:
        items: dict[str, Any] = {}
        opened.visititems(lambda path, item: items.update({f"/{path}": item}))  # no links
        names = {path.removesuffix("/vars"): item.attrs.get("name") for path, item in items.items()}
        saved: Loaders = {}
        for path, item in items.items():
            owner, is_value, number = path.rpartition("/vars/")
            if is_value and isinstance(item, h5py.Dataset) and not item.external and not owner.startswith("/optimizer"):
                layers = [names.get(place) for place in itertools.accumulate(owner.split("/"), "{}/{}".format)]
                name = "/".join([*filter(None, layers[1:]), number])  # the first is the model
                saved[KIND + name] = (item.shape, functools.partial(load, item))
        yield saved


@contextlib.contextmanager
def read_keras(file: IO[bytes]) -> Iterator[Loaders]:
    """The weights alone: the rest may name code."""
    with zipfile.ZipFile(file) as archive, tempfile.TemporaryFile() as unpacked:
        with archive.open("model.weights.h5") as member:
            shutil.copyfileobj(member, unpacked)
        with read_h5(unpacked) as saved:
            yield saved


@contextlib.contextmanager
def read_safetensors(file: IO[bytes]) -> Iterator[Loaders]:
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load
    except ModuleNotFoundError:
        raise UsageError(
            "init_from is a file of safetensors, which is not installed. Install it: pip install safetensors"
        ) from None
    try:
        values = load(file.read())
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    yield {KIND + name: (value.shape, value.copy) for name, value in values.items()}


READERS = {".h5": read_h5, ".keras": read_keras, ".safetensors": read_safetensors}


def name_as_in_model(saved: Loaders, model: keras.Model, weights: Mapping[str, keras.Variable]) -> Loaders:
    """Keras files number the variables of a layer: give them the names that the model has."""
    names, renamed = {id(variable): name for name, variable in weights.items()}, dict[str, str]()
    for layer in all_layers(model):
        own: dict[str, Any] = {}
        layer.save_own_variables(own)
        for number, variable in own.items():
            if id(variable) in names:
                owner = variable.path.removeprefix(f"{model.name}/").rpartition("/")[0]
                ending = f"/{owner}/{number}" if owner else f"/{KIND}{number}"
                found = [name for name in saved if f"/{name}".endswith(ending)]
                renamed |= {name: names[id(variable)] for name in found if len(found) == 1}
    return {renamed.get(name, name): value for name, value in saved.items()}


def load(dataset: h5py.Dataset) -> npt.NDArray[Any]:
    value: npt.NDArray[Any] = dataset[()]
    is_bfloat16 = dataset.attrs.get("dtype") == "bfloat16"  # which HDF5 lacks: Keras writes its bytes
    return value.view(ml_dtypes.bfloat16) if is_bfloat16 and value.dtype.itemsize == 2 else value


def _short(name: str) -> str:
    return name.removeprefix(KIND)
