"""The same training by ``model.fit``: by ringtrain.keras on all ranks, or in processes that train apart.

horovodrun -np 2 python -m ringtrain.bench.own_fits --how ringtrain --model CNN --size 2 --steps 300 ... --output DIR
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from typing import Any

from ringtrain.bench.steps import PEERS

sys.path.insert(0, str(PEERS))  # scripts, which import each other by their bare names

import peer_loop
import peer_models

HOW = ("ringtrain", "horovod", "kept", "unconnected")


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--how", choices=HOW, required=True)
    how, rest = parser.parse_known_args()
    arguments = peer_loop.parse_arguments(__doc__, rest)
    hvd: Any = None
    rank = arguments.rank
    if how.how == "unconnected":
        peer_loop.pin(arguments, rank)
        peer_loop.set_threads(arguments)
    else:
        hvd = importlib.import_module("ringtrain.keras")  # here: cores and threads are chosen before TensorFlow starts
        hvd.init(backend="horovod" if how.how == "horovod" else "auto")
        rank = hvd.rank()
    import keras

    spec = peer_models.MODELS[arguments.model]
    model, optimizer = spec.create(), keras.optimizers.SGD(spec.learning_rate)
    callbacks: list[Any] = [make_timer(arguments)]
    if hvd is not None:
        optimizer = hvd.DistributedOptimizer(optimizer)
        callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    if how.how == "kept":
        callbacks.append(hvd.callbacks.Run(arguments.output / "run"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    model.fit(peer_loop.make_batches(arguments, rank), verbose=0, callbacks=callbacks)
    timer = callbacks[0]
    value = timer.last_loss
    if hvd is not None:
        value = float(hvd.allreduce(value, name="last_loss"))
    if hvd is None or rank == 0:
        name = "result" if hvd is not None else f"result-{rank}"
        peer_loop.write_results(arguments, timer.sec_per_step, value, model, name=name)


def make_timer(arguments: argparse.Namespace) -> Any:
    """A callback with the seconds per step of each ``log_every`` steps, and the loss of the last step's batch."""
    import keras

    class Timer(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.sec_per_step: list[float] = []
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            step = batch + 1
            if step == arguments.steps:
                self.last_loss = float(logs["loss"])
            if step % arguments.log_every == 0:
                value = float(logs["loss"])  # waits for the step
                now = time.perf_counter()
                self.sec_per_step.append((now - self.start) / arguments.log_every)
                self.start = now
                if os.environ.get("OMPI_COMM_WORLD_RANK", str(arguments.rank)) == "0":
                    print(f"step {step}, loss = {value:.4g} ({self.sec_per_step[-1]:.3f} sec/batch)", flush=True)
            if step == arguments.steps - 1:  # the loss of the last step alone
                self.model.reset_metrics()

    return Timer()


if __name__ == "__main__":
    main()
