"""A rank of a group of test processes: starts as a rank of a training run does, then runs test bodies."""

import faulthandler
import gc
import importlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

from ringtrain.runtime.devices import Needs, apply_plan, plan_devices, start_tensorflow
from ringtrain.runtime.machine import read_machine
from ringtrain.runtime.world import World, read_world
from ringtrain.terminal.startup import quiet_start
from tests.world.fork_server import SWITCH

LEAVE_SECONDS = 5.0
BODIES_BETWEEN_COLLECTIONS = 20


def main() -> None:
    directory = Path(os.environ["RINGTRAIN_TEST_SOCKET_DIRECTORY"])
    world = read_world(os.environ)
    (directory / f"pid-{world.rank}").write_text(str(os.getpid()))
    stacks = (directory / f"stacks-{world.rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    collective = None if "--bare" in sys.argv else join(world)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(directory / "socket"))
    reply(connection, {"rank": world.rank})
    serve(connection, collective)
    if collective is not None:
        collective.close()


def join(world: World) -> Any:
    """Start TensorFlow on this rank's devices, and meet the other ranks."""
    backend = os.environ.get("RINGTRAIN_TEST_BACKEND", "auto")
    needs = Needs(one_at_a_time=backend != "horovod")
    plan = plan_devices(world, read_machine(os.environ), os.environ, needs)
    apply_plan(plan)
    with quiet_start():
        start_tensorflow(plan, world)
    if world.size < 3 and os.environ.get(SWITCH) != "1":
        disable_graph_optimizer()
    from ringtrain.collectives import connect, with_native_sums

    return with_native_sums(connect(backend, world), backend)  # type: ignore[arg-type]


def disable_graph_optimizer() -> None:
    """Run graphs as they are built.

    TensorFlow's graph optimizer takes an eighth of the time of the bodies, which run each graph a few times. Groups of
    three ranks and all programs use it.
    """
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def serve(connection: socket.socket, collective: Any) -> None:
    """Run one body after the other until the test process closes the connection, or is gone."""
    requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(connection, requests), daemon=True).start()
    for number, request in enumerate(iter(requests.get, None)):
        reply(connection, run_body(collective, number, **json.loads(request)))


def read_requests(connection: socket.socket, requests: queue.SimpleQueue[str | None]) -> None:
    with connection.makefile() as lines:
        for line in lines:
            requests.put(line)
    requests.put(None)
    threading.Event().wait(LEAVE_SECONDS)
    os._exit(1)  # the main thread hangs in a body


def run_body(collective: Any, number: int, body: str, arguments: dict[str, Any]) -> dict[str, Any]:
    module, _, name = body.partition(":")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", module=r"(ringtrain|tests)(\.|$)")
            if collective is not None:
                forget_last_body(number)
            function = getattr(importlib.import_module(module), name)
            with mock.patch.object(gc, "collect"):  # of Keras, in each clear_session: see forget_last_body
                result = getattr(function, "body", function)(collective, **arguments)
            return {"result": json.loads(json.dumps(result))}
    except BaseException:
        return {"traceback": traceback.format_exc()}


def forget_last_body(number: int) -> None:
    """Reset Keras' global settings, and collect garbage after every 20th body."""
    import keras

    from ringtrain.step.train_step import set_precision

    keras.utils.clear_session(free_memory=False)
    set_precision("float32")
    if number % BODIES_BETWEEN_COLLECTIONS == 0:
        gc.collect()  # half a second: after each body it took two thirds of the time of all bodies
        gc.freeze()  # the objects that remain are in the caches of Keras and TensorFlow


def reply(connection: socket.socket, value: dict[str, Any]) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main()
