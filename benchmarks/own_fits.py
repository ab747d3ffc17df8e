"""The same training by ``model.fit``: by ringtrain.keras on all ranks, or in processes that train apart.

horovodrun -np 2 python -m benchmarks.own_fits --how ringtrain --model CNN --size 2 --steps 300 ... --output DIR
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from benchmarks.steps import PEERS

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
    model, optimizer = spec.create(), peer_models.create_optimizer(spec)
    timer = peer_loop.make_timer(arguments, keras.callbacks.Callback, is_rank0=rank == 0)
    callbacks: list[Any] = [timer]
    if hvd is not None:
        optimizer = hvd.DistributedOptimizer(optimizer)
        callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    if how.how == "kept":
        callbacks.append(hvd.callbacks.Run(arguments.output / "run"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False, steps_per_execution=arguments.steps_per_call)
    model.fit(peer_loop.make_batches(arguments, rank), verbose=0, callbacks=callbacks)
    value = timer.last_loss
    if hvd is not None:
        value = float(hvd.allreduce(value, name="last_loss"))
    if hvd is None or rank == 0:
        name = "result" if hvd is not None else f"result-{rank}"
        peer_loop.write_results(arguments, timer.sec_per_step, value, model, name=name)


if __name__ == "__main__":
    main()
