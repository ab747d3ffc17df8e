"""Private names of Keras and TensorFlow, each with the reason why no public name does."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any


def is_decayed(optimizer: Any, variable: Any) -> bool:
    """Return True if the optimizer's weight decay applies to a weight, which need not be one that it trains.

    Keras has no public way to read what ``exclude_from_weight_decay`` has excluded.

    Args:
        optimizer: of Keras.
        variable: of Keras. Before 3.16 exclusions match the name of its TensorFlow variable, which holds its path.
    """
    if hasattr(optimizer, "_is_excluded_from_weight_decay"):  # since Keras 3.16
        return not optimizer._is_excluded_from_weight_decay(variable)
    return optimizer._use_weight_decay(variable.value)


def exclude_paths_from_decay(optimizer: Any, words: Sequence[str]) -> None:
    """Exclude weights from weight decay if their paths, such as ``model/norm/gamma``, contain one of these words.

    Since Keras 3.16 ``exclude_from_weight_decay`` compares the last part of a path only.
    """
    patterns = [re.escape(word) for word in words]
    if not hasattr(optimizer, "_is_excluded_from_weight_decay"):
        optimizer.exclude_from_weight_decay(var_names=patterns)
        return
    pattern = re.compile("|".join(patterns))
    optimizer._is_excluded_from_weight_decay = lambda variable: bool(pattern.search(variable.path))


def decays_weight(optimizer: Any, weight: Any) -> bool:
    """Return True if the weight decay of a built optimizer applies to one of its weights."""
    return optimizer._use_weight_decay(weight)


def decay_weights_if(optimizer: Any, is_decayed_variable: Callable[[Any], bool]) -> None:
    """Replace the rule by which an optimizer decides to decay a variable; Keras' own matches names."""
    optimizer._use_weight_decay = is_decayed_variable


def skip_epochs_of_shuffle(adapter: Any, epochs: int, num_batches: int) -> None:
    """Bring the order in which Keras shuffles the batches of a ``PyDataset`` to a later epoch.

    Keras has no public way to begin ``fit`` with the order of another epoch than the first.

    Args:
        adapter: Keras' adapter of the data set.
        epochs: number of epochs before.
        num_batches: of each epoch.
    """
    if hasattr(adapter, "_epoch"):  # since Keras 3.16 the order follows from the epoch's number
        adapter._epoch += epochs
        return
    for _ in range(epochs):
        random.shuffle(list(range(num_batches)))


def build_symbolically(model: Any, batch_spec: Any) -> None:
    """Create a model's weights and the variables of its compiled metrics, without a computation.

    ``Model.build`` creates weights only, and not of a model that needs more than shapes.

    Args:
        model: compiled.
        batch_spec: ``tf.TensorSpec`` of (x,), (x, y) or (x, y, sample_weight).
    """
    model._symbolic_build(data_batch=batch_spec)


def all_layers(model: Any) -> list[Any]:
    """Return the model and all layers inside it, at any depth.

    Uses ``Layer._flatten_layers``: the public ``layers`` lists the first level only, and no layer inside a layer.
    """
    return list(model._flatten_layers())


def seed_generators_of(layer: Any) -> list[Any]:
    """Return the seed generators that a layer itself has; the public list of variables mixes them with others."""
    return list(layer._seed_generators)


def own_statistics_of(layer: Any) -> list[Any]:
    """Return the untrained weights that a layer itself has, without those of layers inside it and without seeds."""
    return list(layer._non_trainable_variables)


def call_parameters_of(layer: Any) -> Any:
    """Return the parameters of a layer's ``call``, also if the method was replaced."""
    return layer._call_signature.parameters


def inputs_of_functional_model(model: Any) -> Any:
    """Return the structure of a functional model's inputs; None for other models. ``inputs`` is flat."""
    return getattr(getattr(model, "_functional", model), "_inputs_struct", None)


def metrics_result_or_logs(model: Any, logs: Any) -> dict[str, Any]:
    """Return what ``fit`` gives to callbacks at the end of an epoch of which these are the last logs."""
    return model._get_metrics_result_or_logs(logs)


def begin_fit_at_epoch(model: Any, epoch: int | None) -> None:
    """Let ``fit`` begin with an epoch, after ``on_train_begin`` has read a checkpoint; None: with ``initial_epoch``."""
    model._initial_epoch = epoch


def learning_rate_of(optimizer: Any) -> Any:
    """Return the variable or the schedule of the learning rate; ``learning_rate`` is its value. None without one."""
    return getattr(optimizer, "_learning_rate", None)


def weights_of_optimizer(optimizer: Any) -> list[Any]:
    """Return the weights that a built optimizer updates; ``variables`` are its own."""
    return list(optimizer._trainable_variables)


def index_of_weight(optimizer: Any, weight: Any) -> int:
    """Return the index of a weight, or of its TensorFlow variable, in the optimizer's lists of slots."""
    return optimizer._get_variable_index(weight)


def key_of_weight(optimizer: Any, weight: Any) -> Any:
    """Return the key by which an optimizer knows a weight; it is not the same for all versions of Keras."""
    return optimizer._var_key(weight)


def momentums_of(optimizer: Any) -> list[Any]:
    """Return the first moments of Adam, Lamb, RMSprop or ScheduleFreeAdamW, by index of the weight."""
    return optimizer._momentums


def velocities_of(optimizer: Any) -> list[Any]:
    """Return the second moments of Adam, Lamb or RMSprop, by index of the weight."""
    return optimizer._velocities


def replace_clipping(optimizer: Any, clip: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
    """Let an optimizer clip gradients by a function: Keras' own sees the pieces of one rank."""
    optimizer._clip_gradients = clip


def restore_clipping(optimizer: Any) -> None:
    """Let an optimizer clip gradients as Keras does, after ``replace_clipping``."""
    del optimizer._clip_gradients


def clip_as_keras(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Clip gradients as the optimizer's class does."""
    return type(optimizer)._clip_gradients(optimizer, gradients)


def element_spec_of(epoch_iterator: Any) -> Any:
    """Return the ``tf.TensorSpec`` of the batches of Keras' loop over the data."""
    return epoch_iterator._distributed_dataset.element_spec


def current_iterator_of(epoch_iterator: Any) -> Any:
    """Return the iterator of Keras' loop, which it keeps over epochs if ``steps_per_epoch`` is given."""
    return epoch_iterator._current_iterator


def count_steps(epoch_iterator: Any, steps: int) -> None:
    """Let Keras' loop count steps that it has not made, so that data that end with the epoch begin again with it."""
    epoch_iterator._steps_seen += steps


def forbid_asynchronous_callbacks(callback_list: Any) -> None:
    """Call the callbacks of a batch before the next one: else batches may be counted out of order."""
    callback_list._async_train = False
    callback_list._async_test = False


def inputs_of_dataset(dataset: Any) -> list[Any]:
    """Return the datasets that a ``tf.data.Dataset`` reads."""
    return dataset._inputs()


def argument_of_dataset(dataset: Any, name: str) -> Any:
    """Return an argument with which a ``tf.data.Dataset`` was made, such as ``buffer_size``; None if it has none."""
    return getattr(dataset, f"_{name}", None)


def has_argument(dataset: Any, name: str) -> bool:
    """Return True if a ``tf.data.Dataset`` is of a class with this argument."""
    return hasattr(dataset, f"_{name}")


def resource_of_iterator(iterator: Any) -> Any:
    """Return the handle of a ``tf.data`` iterator; ``tf.train.Checkpoint`` writes its state to files only."""
    return iterator._iterator_resource


def dataset_of_iterator(iterator: Any) -> Any:
    """Return the dataset of a ``tf.data`` iterator, whose options say how it reads ahead; None if it is unknown."""
    return getattr(iterator, "_dataset", None)


def mark_operation(operation: Any, name: str, value: bytes) -> None:
    """Add an attribute to an operation of a graph, which keeps it apart from equal ones."""
    import tensorflow as tf

    operation._set_attr(name, tf.compat.v1.AttrValue(s=value))


def handle_data_of(tensor: Any) -> Any:
    """Return what TensorFlow knows of a resource: type and shape of a variable; None for other tensors."""
    return getattr(tensor, "_handle_data", None)


def call_with_captures(concrete_function: Any, inputs: Sequence[Any], captures: Sequence[Any]) -> Any:
    """Call a concrete function by its inputs and by what it has captured: only so can operations precede captures."""
    return concrete_function._call_flat(inputs, captures)


def are_recorded(tensor: Any) -> bool:
    """Return True if a ``tf.GradientTape`` records what is computed from a tensor."""
    from tensorflow.python.eager.record import should_record_backprop

    return should_record_backprop([tensor])


def note_read(variable: Any) -> None:
    """Let ``tf.GradientTape`` watch a variable that is read by its handle only."""
    from tensorflow.python.ops.resource_variable_ops import variable_accessed

    variable_accessed(variable)


def asynchronous_executor() -> Any:
    """Return an executor on which operations run at the same time as those of the default one."""
    from tensorflow.python.eager import executor

    return executor.new_executor(enable_async=True)


def executor_scope(executor: Any) -> Any:
    """Return a context in which operations run on an executor."""
    from tensorflow.python.eager import context

    return context.executor_scope(executor)


def random_record_reader(path: str) -> Any:
    """Return the only reader of TFRecord files that reads at an offset."""
    from tensorflow.python.lib.io.tf_record import tf_record_random_reader

    return tf_record_random_reader(path)
