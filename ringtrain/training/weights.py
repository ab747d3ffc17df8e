"""First weights from a checkpoint, a Keras file or safetensors, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ringtrain.errors import DataError, UsageError
from ringtrain.messages.rules import list_first
from ringtrain.run.checkpoint import read_checkpoint
from ringtrain.run.store import find_checkpoint
from ringtrain.run.variables import slots_that_begin_as_weights
from ringtrain.runtime.private import all_layers
from ringtrain.training.job import Job
from ringtrain.training.weight_files import (
    KIND,
    SavedVariable,
    SavedVariables,
    explaining_content,
    open_weight_file,
)

MAX_LISTED = 20  # of a file's variables, in a message


def take_weights(job: Job, source: Path) -> list[str]:
    """Set the variables that match by name and shape; return log lines.

    Args:
        job: with the model.
        source: a checkpoint, a run directory, or a file of weights.

    Raises:
        DataError: the source is damaged, or holds values that are not finite.
        UsageError: none of its variables matches.
    """
    weights = {name: v for name, v in job.step.named_variables.items() if name.startswith(KIND)}
    with opening(source, job.step.model, weights) as (path, saved):
        taken = [name for name, v in weights.items() if name in saved and saved[name].shape == tuple(v.shape)]
        if not taken:
            raise UsageError(
                f"init_from {str(path)!r} has no variable of this model's names and shapes; it holds "
                f"{list_first([_short(name) for name in saved], MAX_LISTED) or 'none'}."
            )
        nonfinite = []
        for name in taken:
            if num_values := assign_saved(weights[name], saved[name], path, name):
                nonfinite.append(f"{_short(name)} ({num_values:,} of {weights[name].value.shape.num_elements():,})")
    if nonfinite:
        variables = list_first(nonfinite, MAX_LISTED)
        raise DataError(
            f"init_from {str(path)!r} has values that are not finite (NaN or infinite) in {variables}. "
            "No training can start from them. Give weights that were saved before they became so, such as an older "
            "checkpoint."
        )
    for weight, copy in (*job.step.averages.pairs, *slots_that_begin_as_weights(job.step.optimizer)):
        copy.assign(weight.value)
    lines = [f"init_from {path}: {len(taken)} of {len(weights)} variables taken"]
    for name, variable in weights.items():
        if name not in taken:
            other = f"of shape {list(saved[name].shape)} there" if name in saved else "not there"
            lines.append(f"  new: {_short(name)} {list(variable.shape)}, {other}")
    unused = [_short(name) for name in saved if name not in weights]
    return [*lines, *([f"  not used: {list_first(unused, MAX_LISTED)}"] if unused else [])]


def assign_saved(variable: keras.Variable, saved: SavedVariable, path: Path, name: str) -> int:
    """Assign a saved value; return how many of its numbers are not finite where the model's own were.

    A mask of -inf that the model creates may stay one. Numbers too large for the variable's type count too.
    """
    before = variable.value.numpy()
    value = saved.read()
    with explaining_content(path):
        if np.iscomplexobj(value) and not np.iscomplexobj(before):
            raise ValueError(f"its variable {_short(name)} has complex numbers, and the model's has {variable.dtype}")
        with np.errstate(over="ignore"):  # infinite values are counted below
            variable.assign(value)
    after = variable.value.numpy()
    return int(np.count_nonzero(np.isfinite(before) & ~np.isfinite(after)))


@contextlib.contextmanager
def opening(
    source: Path, model: keras.Model, weights: Mapping[str, keras.Variable]
) -> Iterator[tuple[Path, SavedVariables]]:
    """Yield the path that is read, and its variables by the names of the model."""
    if source.is_dir():
        path = find_checkpoint(source)
        variables = read_checkpoint(path).variables
        yield (
            path,
            {
                name: SavedVariable(value.shape, value.copy)
                for name, value in variables.items()
                if name.startswith(KIND)
            },
        )
        return
    model_bytes = sum(variable.value.dtype.size * variable.value.shape.num_elements() for variable in weights.values())
    with open_weight_file(source, model_bytes=model_bytes) as saved:
        is_of_keras = source.suffix != ".safetensors"
        yield source, name_as_in_model(saved, model, weights) if is_of_keras else saved


def name_as_in_model(
    saved: SavedVariables, model: keras.Model, weights: Mapping[str, keras.Variable]
) -> SavedVariables:
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


def _short(name: str) -> str:
    return name.removeprefix(KIND)
