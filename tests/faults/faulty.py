"""The hook by which faults reach a run where there is no way from outside: a workload that does as it is told.

``RINGTRAIN_TEST_FAULT`` is ``ACT@MOMENT:RANK``: at that moment the rank does it to itself, once. The moments:

- ``setup``: the sources are made; ``compile``: the step is traced;
- ``data``: the data of step ``FAULT_STEP`` are read; ``step``: it is computed;
- ``evaluation``: the data of the first evaluation are read;
- ``save``: rank 0 writes the checkpoint of ``SAVED_STEP``; ``end``: that of the last step.

The acts: ``raise`` an error; ``exit`` at once with 7, ``quit`` with 0; ``sleep`` for ever, ``lock`` with Python's lock;
``nan``: give values that are no numbers; ``flip`` a bit of a weight; ``allocate`` more memory than there is; ``grow``
until the kernel does something about it. Before it the rank makes the file that ``RINGTRAIN_TEST_HERE`` names. To
``pause`` is to wait until somebody removes that file: meanwhile the test does from outside what it wants to, to this
rank or to another.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.data.sources import ArraySource
from ringtrain.files import atomic
from ringtrain.run.store import step_name
from ringtrain.runtime import activity
from ringtrain.step.many_steps import ManySteps
from ringtrain.training import calls
from ringtrain.workloads.base import Sources
from tests.world.workloads.lasting import Lasting, hang, my_rank

STEPS = 24  # three epochs of eight steps; an evaluation after steps 16 and 24
SAVED_STEP = 10
FAULT_STEP = 12
PAUSE_SECONDS = 60.0
GROWTH_BYTES = 2**32
EXIT_CODE = 7

here = Path(os.environ.get("RINGTRAIN_TEST_HERE", "/nowhere"))
act_name, _, _place = os.environ.get("RINGTRAIN_TEST_FAULT", "none@nowhere:none").partition("@")
moment, _, rank = _place.partition(":")
is_mine = rank == my_rank()
# What may take long may do so for ten minutes: too long for a test.
activity.LONG_SECONDS = float(os.environ.get("RINGTRAIN_TEST_LONG_SECONDS", activity.LONG_SECONDS))
_done = False


def act(values: np.ndarray, weights: list[Any] | None = None) -> np.ndarray:
    """What this rank was told to do, the first time that it comes here."""
    global _done
    if _done:
        return values
    _done = True
    here.touch()
    if act_name == "nan":
        return np.full_like(values, np.nan)
    if act_name == "flip" and weights:
        bits = weights[0].numpy()
        bits.view(np.uint32).flat[0] ^= 1
        weights[0].assign(bits)
    others: dict[str, Callable[[], Any]] = {
        "raise": raise_fault,
        "exit": lambda: os._exit(EXIT_CODE),
        "quit": lambda: os._exit(0),
        "sleep": lambda: hang("data"),
        "lock": lambda: hang("lock"),
        "allocate": lambda: np.zeros(2**50),
        "grow": grow,
        "pause": pause,
    }
    others.get(act_name, lambda: None)()
    return values


def raise_fault() -> None:
    raise ZeroDivisionError(f"the fault of rank {rank}")


def grow() -> None:
    held = [np.ones(2**24, np.uint8) for _ in range(GROWTH_BYTES // 2**24)]
    raise MemoryError(f"nothing has ended this process, which holds {len(held) * 2**24} bytes more")


def pause() -> None:
    end = time.monotonic() + PAUSE_SECONDS
    while here.exists() and time.monotonic() < end:
        time.sleep(0.005)


def act_in_graph(values: tf.Tensor, *, at_call: int = 1, weights: list[Any] | None = None) -> tf.Tensor:
    """The values; at this call of the graph the act comes before them."""
    calls = itertools.count(1)

    def pass_on(array: np.ndarray) -> np.ndarray:
        return act(array, weights) if next(calls) == at_call else array

    return tf.ensure_shape(tf.numpy_function(pass_on, [values], values.dtype), values.shape)


def flush(descriptor: int) -> None:
    """As ``atomic.flush``, with the act before it."""
    place = os.readlink(f"/proc/self/fd/{descriptor}")
    if f".writing-{step_name({'save': SAVED_STEP, 'end': STEPS}[moment])}" in place:
        act(np.zeros(1))
    os.fsync(descriptor)


def trace_many(steps: ManySteps) -> None:
    Path(f"{here}-many").touch()
    right_trace(steps)


if "--steps_per_call" in sys.argv:
    calls.CHECKED_STEPS = 1  # type: ignore[attr-defined]  # labels are looked at in single steps
    right_trace = ManySteps.trace
    ManySteps.trace = trace_many  # type: ignore[method-assign,assignment]

if is_mine and moment in ("save", "end"):
    atomic.flush = flush


class ActingSource(ArraySource):
    """Samples in whose reading the act takes place."""

    def gather(self, indices: tf.Tensor) -> tuple[Any, Any]:
        x, y = super().gather(indices)
        return (act_in_graph(x) if is_mine and moment == "evaluation" else x), y


class Faulty(Lasting):
    """``Lasting`` with a fault in it."""

    def create_model(self) -> keras.Model:
        self.model = super().create_model()
        return self.model

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        if is_mine and moment == "setup":
            act(np.zeros(1))
        sources = super().create_sources(data_dir, synthetic=synthetic)
        assert isinstance(sources.evaluation, ArraySource)
        acting = ActingSource(sources.evaluation.x, sources.evaluation.y, sources.evaluation.num_samples)
        return sources._replace(evaluation=acting)

    def augment(self, x: tf.Tensor, y: Any, keys: tf.Tensor) -> tuple[tf.Tensor, Any]:
        x, y = super().augment(x, y, keys)
        return (act_in_graph(x, at_call=FAULT_STEP) if is_mine and moment == "data" else x), y

    def loss(self, y: Any, outputs: tf.Tensor) -> tf.Tensor:
        if is_mine and moment == "compile":
            act(np.zeros(1))
        if is_mine and moment == "step":
            outputs = outputs + tf.stop_gradient(
                act_in_graph(outputs, at_call=FAULT_STEP, weights=[v._value for v in self.model.trainable_variables])
                - outputs
            )
        return super().loss(y, outputs)
