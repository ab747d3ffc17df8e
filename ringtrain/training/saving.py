"""Asynchronous checkpoints: a snapshot in host memory, written by another thread."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from ringtrain.config import Config, to_plain
from ringtrain.errors import RingtrainError, UsageError
from ringtrain.guard.preflight import package_versions
from ringtrain.messages.log import LOG
from ringtrain.run.checkpoint import Checkpoint
from ringtrain.run.directory import RunDirectory
from ringtrain.run.resume import Progress
from ringtrain.run.store import find_best, step_name, tidy, write_checkpoint
from ringtrain.run.variables import describe_difference
from ringtrain.training.job import Job
from ringtrain.training.row_state import without_row_state


class CheckpointWriter:
    """Writes one checkpoint at a time. A failure only warns, as the next may succeed; the last save must."""

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
    variables = without_row_state(checkpoint.variables)
    set_values(job.step.named_variables, variables, shared_out=job.step.shapes_of_shared_out)


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
