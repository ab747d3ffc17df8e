"""Asynchronous checkpoints: a snapshot in host memory, written by another thread.

Also the first weights from a checkpoint, a Keras file or safetensors, by name.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import h5py
import keras
import ml_dtypes
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from ringtrain.config import Config, to_plain
from ringtrain.errors import DataError, RingtrainError, UsageError
from ringtrain.files.bounded import open_regular
from ringtrain.guard.preflight import package_versions
from ringtrain.messages.defects import describe_defect
from ringtrain.messages.log import LOG
from ringtrain.run.checkpoint import Checkpoint, read_checkpoint
from ringtrain.run.directory import RunDirectory
from ringtrain.run.resume import Progress
from ringtrain.run.store import find_best, find_checkpoint, step_name, tidy, write_checkpoint
from ringtrain.run.variables import describe_difference, slots_that_begin_as_weights
from ringtrain.training.job import Job


class CheckpointWriter:
    """Writes one checkpoint at a time. Failures only warn: the next may succeed."""

    def __init__(self, run: RunDirectory, *, keep: int, last_step: int) -> None:
        """``last_step``: of the checkpoint to resume from; 0: none."""
        self.last_step = last_step
        self._run, self._keep = run, keep
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: concurrent.futures.Future[None] | None = None

    def save(self, checkpoint: Checkpoint, *, as_step: bool, as_best: bool) -> None:
        """Start a write; wait only for the previous one."""
        self.wait()
        self._under_way = self._executor.submit(self._write, checkpoint, as_step=as_step, as_best=as_best)

    def finish(self, checkpoint: Checkpoint) -> str:
        self.wait()
        try:
            self._write(checkpoint, as_step=True, as_best=False)
        except OSError as error:
            raise RingtrainError(f"{error} Make room, and start the same command again.") from error
        finally:
            self._executor.shutdown()
        return str(self._run.checkpoints)

    def wait(self) -> None:
        if self._under_way is None:
            return
        try:
            self._under_way.result()
        except OSError as error:
            self._warn(str(error))
        finally:
            self._under_way = None

    def _write(self, checkpoint: Checkpoint, *, as_step: bool, as_best: bool) -> None:
        start = time.perf_counter()
        root, may_write = self._run.checkpoints, self._run.may_write
        may_write()  # reports a run directory that was moved away
        for is_best in (False, True):
            if not (as_best if is_best else as_step):
                continue
            try:
                path = write_checkpoint(root, checkpoint, is_best=is_best, may_write=may_write)
            except OSError as error:
                raise OSError(self._explain(checkpoint, error, is_best=is_best)) from error
            if not is_best:
                self.last_step = checkpoint.step
            self._run.write_event(
                "checkpoint",
                step=checkpoint.step,
                path=str(path.relative_to(self._run.path)),
                seconds=round(time.perf_counter() - start, 3),
            )
        try:
            tidy(root, self._keep)
        except OSError as error:
            self._warn(
                f"what --keep {self._keep} leaves out below {str(root)!r} cannot be removed: {error.strerror or error}."
            )

    def _explain(self, checkpoint: Checkpoint, error: OSError, *, is_best: bool) -> str:
        stands = f"The latest is that of step {self.last_step}" if self.last_step else "Nothing was saved before it"
        if is_best:
            best = find_best(self._run.checkpoints)
            is_former = best is not None and not best.name.endswith(step_name(checkpoint.step))
            stands = "The best one before it is kept" if is_former else "There was no best one before it"
        return (
            f"the {'best ' if is_best else ''}checkpoint of step {checkpoint.step} cannot be written below "
            f"{str(self._run.checkpoints)!r}: {error.strerror or error}. {stands}."
        )

    def _warn(self, message: str) -> None:
        LOG.warning(message)
        self._run.write_event("warning", step=self.last_step, message=message)


def take_snapshot(
    variables: Mapping[str, keras.Variable],
    step: int,
    progress: Progress,
    run_facts: Mapping[str, Any],
    gathered: Mapping[str, npt.NDArray[Any]] | None = None,
) -> Checkpoint:
    """Return a snapshot in host memory; ``gathered`` are sharded slots.

    Host tensors are immutable (updates write to other memory), so only GPU values are copied.
    """
    values = {name: np.asarray(tf.convert_to_tensor(variable.value)) for name, variable in variables.items()}
    return Checkpoint(step=step, variables=values | dict(gathered or {}), progress=asdict(progress), run=run_facts)


def describe_run(config: Config, size: int, identity: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        "identity": identity,
        "workload": config.workload,
        "world_size": size,
        "versions": package_versions(),
        "git_revision": _git_revision(),
        "command": sys.argv,
        "config": to_plain(asdict(config)),
    }


def restore(job: Job, checkpoint: Checkpoint) -> None:
    facts: dict[str, Any] = {"workload": job.config.workload}
    if job.plan.order.known_samples is not None:
        facts["samples"] = job.plan.order.known_samples
    for name, value in facts.items():
        if checkpoint.run.get(name) != value:
            raise UsageError(
                f"the newest checkpoint of the run is of another run: its {name} is {checkpoint.run.get(name)}, not "
                f"{value}. Give the data and the workload that the run began with, or start a new run with "
                "--resume never."
            )
    set_values(job.step.named_variables, checkpoint.variables, shared_out=job.step.shapes_of_shared_out)


def set_values(
    variables: Mapping[str, keras.Variable],
    values: Mapping[str, npt.NDArray[Any]],
    shared_out: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
) -> None:
    """Names, shapes and types must match; sharded values are set elsewhere."""
    shapes = {name: (tuple(v.shape), str(v.dtype)) for name, v in variables.items()} | dict(shared_out or {})
    saved = {name: (value.shape, value.dtype.name) for name, value in values.items()}
    if shapes != saved:
        names = describe_difference(list(saved), list(shapes))
        changed = [f"{name} was {saved[name]}, is {now}" for name, now in shapes.items() if saved.get(name, now) != now]
        differences = [*([names] if names else []), *changed[:5]]
        raise UsageError(
            f"the model or the optimizer is not the one that the run began with: {'; '.join(differences)}. "
            "Bring the former one back, or start a new run with --resume never and --init_from."
        )
    for name, variable in variables.items():
        variable.assign(values[name])


def _git_revision() -> str | None:
    """Return the commit, with ``-dirty`` if files differ; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip() or None


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
    for layer in model._flatten_layers():
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
