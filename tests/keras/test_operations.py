"""Horovod's operations on tensors, by ``import ringtrain.keras as hvd``, in eager code and in graphs."""

from collections.abc import Callable
from typing import Any

import horovod.tensorflow
import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain.keras as hvd
from ringtrain.collectives import Collective, all_gather_object
from ringtrain.collectives.gradients import GradientReduction
from ringtrain.errors import UsageError
from ringtrain.keras.exchanged_tensors import Reduced
from tests.keras.training import largest_difference, make_batches, make_model, split_batches, train
from tests.world.group import Launch, on_ranks

# Each takes a tensor [6, 2] and the interface: ringtrain's, or Horovod's own.
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda x, h: h.allreduce(x),
    "average=False": lambda x, h: h.allreduce(x, average=False),
    "sum": lambda x, h: h.allreduce(x, op=h.Sum, prescale_factor=0.5, postscale_factor=3.0),
    "min": lambda x, h: h.allreduce(tf.stop_gradient(x), op=h.Min) + x,
    "max": lambda x, h: h.allreduce(tf.stop_gradient(x), op=h.Max, name="named") + x,
    "product": lambda x, h: h.allreduce(tf.stop_gradient(x), op=h.Product) + x,
    "fp16": lambda x, h: h.allreduce(tensor=x, compression=h.Compression.fp16),
    "several": lambda x, h: h.grouped_allreduce([x, 2 * x], op=h.Sum),
    "gather": lambda x, h: h.allgather(x[: 1 + h.rank()]),
    "gather several": lambda x, h: h.grouped_allgather([x, x[: 1 + h.rank()]]),
    "broadcast": lambda x, h: h.broadcast(x, h.size() - 1),
    "all to all": lambda x, h: h.alltoall(x),
    "all to all by splits": lambda x, h: h.alltoall(x, splits=[1] * h.size()),
    "scatter": lambda x, h: h.reducescatter(x),
    "scatter sums": lambda x, h: h.reducescatter(x, op=h.Sum, prescale_factor=0.5),
    "scatter several": lambda x, h: h.grouped_reducescatter([x, 2 * x]),
    "sizes": lambda x, h: x * tf.cast(h.size_op() + 10 * h.rank_op(), x.dtype),
    "local sizes": lambda x, h: x * tf.cast(h.local_size_op() + h.local_rank_op(), x.dtype),
}


def compute(name: str, interface: Any, x: tf.Tensor) -> list[np.ndarray]:
    """Return what an operation gives, and the gradient of a function of it."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        results = tf.nest.flatten(OPERATIONS[name](x, interface))
        floats = [result for result in results if result.dtype.is_floating]
        total = tf.add_n([tf.reduce_sum(tf.square(result)) for result in floats])
    return [*results, tape.gradient(total, x)]


@pytest.mark.parametrize("name", OPERATIONS)
@on_ranks(1, 2, 3)
def test_an_operation_gives_horovod_s_values_and_gradients(collective: Collective, name: str) -> None:
    """In eager code, and in a graph in which rank 0 has created more layers than the others."""
    hvd.init()
    x = tf.constant(np.random.default_rng(hvd.rank()).normal(size=(6, 2)) + 2.0)
    right = compute(name, horovod.tensorflow, x)
    eager = compute(name, hvd, x)
    for _ in range(2 if hvd.rank() == 0 else 0):
        keras.layers.Dense(1)

    class Calls(keras.layers.Layer):
        def call(self, x: tf.Tensor) -> Any:
            return compute(name, hvd, x)

    in_graph = tf.function(Calls(dtype="float64"))(x)
    for found in (eager, in_graph):
        for value, expected in zip(found, right, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-12)


def public_names(module: Any) -> set[str]:
    return {name for name in dir(module) if name[0] != "_" and type(getattr(module, name)) is not type(tf)}


INTERNAL = {
    "LocalGradientAggregationHelper",
    "check_extension",
    "check_num_rank_power_of_2",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "refs_to_vars",
    "split_list",
    "vars_to_refs",
}


def test_every_name_of_horovod_works_or_is_refused_in_one_line() -> None:
    theirs = public_names(horovod.tensorflow)
    assert theirs - set(hvd.__all__) == INTERNAL | {"broadcast_object_fn"}
    for name in INTERNAL:
        with pytest.raises(AttributeError, match=f"no '{name}': it is internal to Horovod"):
            getattr(hvd, name)
    with pytest.raises(AttributeError, match="use broadcast_object"):
        getattr(hvd, "broadcast_object_fn")  # noqa: B009


@on_ranks(1, 2, 3)
def test_variables_and_sparse_tensors_are_reduced(collective: Collective) -> None:
    hvd.init()
    size, rank = hvd.size(), hvd.rank()
    variable = keras.Variable([1.0 + rank, 2.0])
    plain = tf.Variable([5.0 + rank])
    mean = 1.0 + (size - 1) / 2
    sparse = tf.IndexedSlices(tf.ones([3, 2]), tf.constant([rank, 1, 1]), tf.constant([4, 2]))

    def call() -> Any:
        total = hvd.allreduce(sparse, op=hvd.Sum)
        means = hvd.grouped_allreduce([variable, plain, sparse, tf.constant(3)], op=hvd.Average)
        return hvd.allreduce(variable), total, means

    for function in (call, tf.function(call)):
        reduced, total, means = function()
        np.testing.assert_allclose(reduced, [mean, 2.0])
        assert len(np.unique(total.indices)) == len(total.indices) == max(size, 2)
        rows = np.zeros([4, 2])
        rows[1] = 2 * size
        rows[:size] += 1
        np.testing.assert_allclose(tf.convert_to_tensor(total), rows)
        np.testing.assert_allclose(means[0], [mean, 2.0])
        np.testing.assert_allclose(means[1], [4.0 + mean])
        np.testing.assert_allclose(tf.convert_to_tensor(means[2]), rows / size)
        assert int(means[3]) == 3

    def send() -> Any:
        return hvd.broadcast_([variable, plain], size - 1)

    for function in (send, tf.function(send)):
        variable.assign([1.0 + rank, 2.0])
        plain.assign([5.0 + rank])
        function()
        np.testing.assert_allclose(variable.numpy(), [float(size), 2.0])
        np.testing.assert_allclose(plain, [4.0 + size])


@on_ranks(Launch(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}))
def test_operations_take_process_sets(collective: Collective) -> None:
    hvd.init()
    outer = hvd.ProcessSet([0, 2])
    hvd.add_process_set(outer)
    x = tf.constant([[1.0 + hvd.rank()], [2.0]])

    def call() -> Any:
        return (
            hvd.allreduce(x, process_set=outer),
            hvd.grouped_allreduce([x], process_set=outer),
            hvd.allgather(x, process_set=outer),
            hvd.broadcast(x, 2, process_set=outer),
            hvd.alltoall(x, process_set=outer),
            hvd.reducescatter(x, process_set=outer),
        )

    if outer.included():
        for function in (call, tf.function(call)):
            mean, [again], whole, of_root, rows, part = function()
            np.testing.assert_allclose(mean, [[2.0], [2.0]])
            np.testing.assert_allclose(again, mean)
            np.testing.assert_allclose(whole, [[1.0], [2.0], [3.0], [2.0]])
            np.testing.assert_allclose(of_root, [[3.0], [2.0]])
            np.testing.assert_allclose(rows, [[1.0], [3.0]] if hvd.rank() == 0 else [[2.0], [2.0]])
            np.testing.assert_allclose(part, [[2.0]])
    hvd.remove_process_set(outer)


@on_ranks(2)
def test_names_of_operations_are_equal_on_ranks_with_other_layers(collective: Collective) -> None:
    hvd.init()
    for _ in range(3 * hvd.rank()):
        keras.layers.Dense(1)
    layer = keras.layers.Dense(2, dtype="float64")

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(hvd.allgather(layer(x))) + hvd.allreduce(tf.reduce_sum(layer(x)))
        return tape.gradient(loss, [weight.value for weight in layer.trainable_weights])

    graph = step.get_concrete_function(tf.ones([2, 3], tf.float64)).graph
    names = [
        operation.name.rpartition("/")[2]
        for operation in graph.get_operations()
        if operation.type.startswith("Horovod")
    ]
    by_rank = all_gather_object(collective, sorted(names), name="names")
    assert by_rank[0] == by_rank[1]
    assert len(set(names)) == len(names) == 5


@on_ranks(2)
def test_objects_are_refused_in_a_graph_and_have_one_name(collective: Collective) -> None:
    hvd.init()
    assert hvd.broadcast_object({"of": 0} if hvd.rank() == 0 else None, 0) == {"of": 0}
    assert hvd.allgather_object([1] if hvd.rank() else 2) == [2, [1]]
    for function in (hvd.broadcast_object, hvd.allgather_object):
        with pytest.raises(UsageError, match=r"was called in a tf\.function, and sends Python objects"):
            tf.function(function, autograph=False)({"a": 1})


def test_init_comes_before_operations() -> None:
    with pytest.raises(UsageError, match=r"allreduce needs to know the ranks.*ringtrain.keras.init\(\)"):
        hvd.allreduce([1.0])


class OwnReduction(keras.Sequential):
    """Reduces its gradients by ``hvd.grouped_allreduce``, or only the loss that it logs."""

    reduces_gradients = True

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, [variable.value for variable in self.trainable_variables])
        mean = hvd.allreduce(loss)
        if self.reduces_gradients:
            gradients = hvd.grouped_allreduce(gradients)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": mean}


@on_ranks(2)
def test_a_step_may_reduce_its_gradients_by_an_operation(collective: Collective) -> None:
    """With the optimizer of Keras; a reduction of the loss alone is not enough."""
    hvd.init()
    Reduced.shapes.clear()
    GradientReduction.calls = 0
    batches = split_batches(make_batches(4))
    model = OwnReduction(make_model().layers)
    model.reduces_gradients = False
    with pytest.raises(UsageError, match=r"is not distributed"):
        train("fit", model, keras.optimizers.SGD(0.1), batches)
    model = OwnReduction(make_model().layers)
    train("fit", model, keras.optimizers.SGD(0.1), batches)
    right = make_model()
    train("fit", right, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), batches)
    assert largest_difference(model, right) < 1e-5
    Reduced.shapes.clear()
