"""A user's script that trains several runs in one process: ``several.py CASE DIRECTORY BACKEND``."""

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

import ringtrain
from ringtrain import Sources, Workload, from_arrays

NUM_FOLDS = 2
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


class Fold(Workload):
    """A line; a fold leaves out some of its samples, and evaluates on them."""

    defaults: ClassVar[Mapping[str, Any]] = {"steps": 6, "global_batch_size": 6, "deterministic": True}
    options: ClassVar[Mapping[str, Any]] = {"fold": 0, "diverges": False}

    def create_model(self) -> keras.Model:
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, "tanh"), keras.layers.Dense(1)])

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        x = np.linspace(-1, 1, 30, dtype=np.float32).reshape(-1, 1)
        is_held_out = np.arange(30) % NUM_FOLDS == self.options["fold"]
        y = x * np.nan if self.options["diverges"] else 3 * x
        train = from_arrays(x[~is_held_out], y[~is_held_out])
        return Sources(train=train, evaluation=from_arrays(x[is_held_out], 3 * x[is_held_out]))

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return keras.losses.mean_squared_error(y, outputs)


def train_fold(directory: Path, backend: str, fold: int, **settings: Any) -> Any:
    options = {"fold": fold, "diverges": settings.pop("diverges", False)}
    name = settings.pop("name", f"fold{fold}")
    return ringtrain.train(Fold, {"options": options, "out": str(directory / name), "backend": backend, **settings})


def train_failing(directory: Path, backend: str, **settings: Any) -> int:
    """Return the exit code of a run that fails."""
    try:
        train_fold(directory, backend, 0, **settings)
    except SystemExit as error:
        return int(error.code or 0)
    raise AssertionError("the run has not failed")


def main() -> None:
    case = sys.argv[1]
    directory = Path(sys.argv[2])
    backend = sys.argv[3]
    if case == "only fold 1":
        train_fold(directory, backend, 1)
        return
    train_fold(directory, backend, 0, exit_timeout=1.0)
    if case == "folds":
        codes = [
            train_failing(directory, backend, name="diverging", diverges=True, on_nonfinite="stop"),
            train_failing(directory, backend, name="wrong", epochs=0),
            train_failing(directory, backend, name="unlike", best_metric="f1"),
        ]
        print(f"<exit codes {codes}>")
        result = train_fold(directory, backend, 1)
        print(f"<fold 1: {result.evaluation.samples} samples>", flush=True)
    elif case == "other backend":
        train_fold(directory, "native" if backend == "horovod" else "horovod", 1)
    elif case == "one rank fails":
        if RANK == 1:
            raise ZeroDivisionError("between the runs")
        train_fold(directory, backend, 1)
    elif case == "rank 0 goes on" and RANK == 0:
        time.sleep(2)  # longer than exit_timeout
        print("<rank 0 has gone on>", flush=True)
    elif case == "rank 0 is kept" and RANK == 0:
        threading.Thread(target=time.sleep, args=(3600,), name="monitor").start()


if __name__ == "__main__":
    main()
