"""The sums of the first gradients do not wait for the last ones, so that they can travel during the backward pass.

`python -m benchmarks.overlap` counts the steps in which they do.
"""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from ringtrain.collectives import Collective
from ringtrain.collectives.connect import connect
from ringtrain.config import Config
from ringtrain.training.job import create_job
from tests.world.group import on_ranks
from tests.world.training import NUM_CLASSES, NUM_FEATURES, Classification

WIDTH = 600  # a layer's gradient is more than the smallest group


def wide_model() -> keras.Model:
    layers = keras.layers
    hidden = [layers.Dense(WIDTH, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((NUM_FEATURES,)), *hidden, layers.Dense(NUM_CLASSES)])


def needed_before(operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """All operations that must be done before these start."""
    needed: set[tf.Operation] = set()
    waiting = list(operations)
    while waiting:
        current = waiting.pop()
        for earlier in [*(tensor.op for tensor in current.inputs), *current.control_inputs]:
            if earlier not in needed:
                needed.add(earlier)
                waiting.append(earlier)
    return needed


def gradients_among(operations: Iterable[tf.Operation]) -> list[str]:
    """Names of the operations that compute a gradient of a weight."""
    return [operation.name for operation in operations if operation.type in ("MatMul", "BiasAddGrad")]


def sums_by_name(graph: Any) -> dict[str, list[tf.Operation]]:
    """Horovod's all-reduces by what they sum: ``control``, and ``gradients/0``, ... by group."""
    sums: dict[str, list[tf.Operation]] = {}
    for operation in graph.get_operations():
        if operation.type in ("HorovodAllreduce", "HorovodGroupedAllreduce"):
            sums.setdefault(operation.name.partition("_")[0], []).append(operation)
    return sums


@on_ranks(2)
def test_no_sum_waits_for_gradients_of_later_groups(collective: Collective) -> None:
    """The backward pass computes the last layer first: its gradients are the first group."""
    by_horovod = connect("horovod", collective.world)
    config = Config(backend="horovod", batch_size=8, epochs=1)
    job = create_job(Classification(wide_model), config, by_horovod, num_threads=1, in_groups=True)
    sums = sums_by_name(job.step.train.graph)
    num_groups = len(sums) - 1
    assert num_groups >= 3
    needed = [needed_before(sums["control"])]
    needed += [needed_before(sums[f"gradients/{number}"]) for number in range(num_groups)]
    for number, needed_first in enumerate(needed):
        for needed_later in needed[number + 1 :]:
            assert gradients_among(needed_later - needed_first), "it waits for the gradients of a later sum"
