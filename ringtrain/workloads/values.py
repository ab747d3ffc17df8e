"""A workload applied to a batch: outputs, losses and metrics."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from ringtrain.data.pipeline import describe_structure
from ringtrain.errors import DataError, UsageError
from ringtrain.messages.defects import describe_defect, is_users_own
from ringtrain.runtime.private import all_layers, inputs_of_functional_model
from ringtrain.workloads.base import Workload

# Keys of events in metrics.jsonl.
RESERVED_NAMES = {
    "communication_sec", "compute_sec", "data_loss", "epoch", "event", "examples_per_sec", "gradient_norm",
    "input_sec", "loss", "lr", "other_sec", "restart_sec", "samples", "samples_seen", "sec_per_step", "seconds", "step",
    "time",
}  # fmt: skip
# Functions of Keras and TensorFlow.
SPARSE_LOSSES = {"sparse_categorical_crossentropy", "sparse_softmax_cross_entropy_with_logits"}
FORGOTTEN = "None: is a return missing?"


def needs_every_rank(workload: Workload, model: keras.Model) -> bool:
    """True if values involve other ranks, as in SyncBatchNormalization."""
    return workload.needs_every_rank or any(getattr(layer, "needs_every_rank", False) for layer in all_layers(model))


def call_model(workload: Workload, model: keras.Model, x: Any, *, training: bool) -> Any:
    """Errors of user-defined layers are raised unchanged."""
    try:
        outputs = model(with_known_dimensions(model, x), training=training)
    except Exception as error:
        if isinstance(error, tf.errors.ResourceExhaustedError) or any(
            is_users_own(frame.filename) for frame in traceback.extract_tb(error.__traceback__)
        ):
            raise
        which = "training" if training else "evaluation"
        inputs = inputs_of_functional_model(model)
        takes = "" if inputs is None else f", which takes {describe_structure(inputs)},"
        raise UsageError(
            f"the model of {type(workload).__name__}.create_model{takes} does not take the x of the {which} samples, "
            f"{describe_structure(x)}: {describe_defect(error)}. Let create_model's keras.Input and what "
            "create_sources gives fit each other."
        ) from error
    if not all(tf.is_tensor(output) for output in tf.nest.flatten(outputs)):
        raise UsageError(
            f"the model of {type(workload).__name__}.create_model gave {describe_structure(outputs)}; its call must "
            "give a tensor, or a structure of tensors."
        )
    return outputs


def with_known_dimensions(model: keras.Model, x: Any) -> Any:
    """Give inputs of unknown length the dimensions that the model's ``keras.Input`` fixes; layers compute by them."""
    inputs = getattr(model, "inputs", None)
    leaves = tf.nest.flatten(x)
    if not inputs or len(inputs) != len(leaves) or len(leaves) != 1:
        return x
    [leaf] = leaves
    [known] = inputs
    is_dense = isinstance(leaf, tf.Tensor) and leaf.shape.rank == len(known.shape)
    if not is_dense or leaf.shape[1:].is_fully_defined():
        return x
    return tf.nest.pack_sequence_as(x, [tf.ensure_shape(leaf, [None, *known.shape[1:]])])


def per_sample(workload: Workload, y: Any, outputs: Any) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Return losses and metrics, [n] each; see ``as_computed``."""
    y, outputs = as_computed(y, outputs)
    name = type(workload).__name__
    num_samples = next((leaf.shape[0] for leaf in tf.nest.flatten(y) if leaf.shape.rank), None)
    with explaining_targets(name, y, outputs):
        given_losses = workload.loss(y, outputs)
    losses = _one_for_each(name, "loss", given_losses, num_samples)
    if not losses.dtype.is_floating:
        raise UsageError(
            f"{name}.loss gave {describe_structure(losses)}, which has no gradient; it must be floating-point."
        )
    metrics = workload.metrics(y, outputs)
    if not isinstance(metrics, Mapping) or not all(isinstance(key, str) for key in metrics):
        given = FORGOTTEN if metrics is None else f"{metrics!r:.80}."
        raise UsageError(
            f"{name}.metrics gave {given} It must give a dict of names and values, such as {{'accuracy': values}}; "
            "{} for none."
        )
    taken = sorted(RESERVED_NAMES & set(metrics))
    if taken:
        raise UsageError(
            f"{name}.metrics gives {taken[0]!r}, but metrics.jsonl keeps something else by that name. Give it another, "
            f"such as {'my_' + taken[0]!r}; taken are {', '.join(sorted(RESERVED_NAMES))}."
        )
    return losses, {key: _one_for_each(name, key, value, num_samples) for key, value in metrics.items()}


@contextlib.contextmanager
def explaining_targets(workload: str, y: Any, outputs: Any) -> Iterator[None]:
    """Raise DataError if a loss of Keras or TensorFlow failed because it takes another kind of y.

    Other errors, such as those of the user's code, are raised unchanged.
    """
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        reason = "" if is_users_own(frames[-1].filename) else _misfit_of({frame.name for frame in frames}, y, outputs)
        if not reason:
            raise
        raise DataError(
            f"{workload}.loss does not take the y of the samples, {describe_structure(y)}, with the outputs "
            f"{describe_structure(outputs)}: {reason}"
        ) from error


def _misfit_of(functions: set[str], y: Any, outputs: Any) -> str:
    """Return why y does not fit a failed loss, and the remedy; empty if another reason is possible.

    ``functions``: names of all that were running.
    """
    leaves = [leaf for leaf in tf.nest.flatten(y) if tf.is_tensor(leaf)]
    if any(leaf.dtype == tf.string for leaf in leaves):
        return (
            "a loss takes numbers, and these are texts. Number the classes: "
            "names, labels = np.unique(labels, return_inverse=True)."
        )
    if any(leaf.dtype.is_complex for leaf in leaves):
        return "the loss takes real numbers, and these are complex. Give their real or absolute values."
    if len(leaves) != 1 or not tf.is_tensor(outputs):
        return ""
    [labels] = leaves
    if labels.shape.rank is None or outputs.shape.rank is None:
        return ""
    is_categorical = "categorical_crossentropy" in functions
    if functions & SPARSE_LOSSES and labels.shape.rank == outputs.shape.rank:
        return (
            "a sparse cross-entropy takes the number of a class for each sample, and these are one-hot. Use "
            "keras.losses.categorical_crossentropy, or give np.argmax(labels, axis=-1)."
        )
    if is_categorical and labels.shape.rank == outputs.shape.rank - 1:
        return (
            "categorical_crossentropy takes one-hot labels, and these are numbers. Use "
            "keras.losses.sparse_categorical_crossentropy, or give keras.utils.to_categorical(labels)."
        )
    return ""


def as_computed(y: Any, outputs: Any) -> tuple[Any, Any]:
    """Return y and outputs in the types that losses and metrics get.

    Half-precision outputs become float32, for their range. For float64 outputs (``verify``) y's floats become float64:
    TensorFlow does not mix types.
    """
    halves = (tf.float16, tf.bfloat16)
    outputs = tf.nest.map_structure(lambda each: tf.cast(each, tf.float32) if each.dtype in halves else each, outputs)
    if any(tensor.dtype == tf.float64 for tensor in tf.nest.flatten(outputs)):
        y = tf.nest.map_structure(lambda each: tf.cast(each, tf.float64) if each.dtype.is_floating else each, y)
    return y, outputs


def _one_for_each(workload: str, name: str, value: Any, num_samples: int | None) -> tf.Tensor:
    """Check the tensor [n]; ``num_samples``: n, if known in tracing."""
    what = f"{workload} gives {name!r} "
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        given = f"as {FORGOTTEN}" if value is None else f"as a Python object of type {type(value).__name__}."
        raise UsageError(f"{what}{given} Each sample needs one value: a tensor [n].") from None
    shape = tensor.shape
    if shape.rank != 1 or (None not in (shape[0], num_samples) and shape[0] != num_samples):
        remedy = "Take the mean over the other dimensions."
        if shape.rank == 0:
            remedy = "Leave out the mean over the samples: it is taken over those of all ranks."
        elif shape.rank is None:
            remedy = "Say it of what TensorFlow cannot know: tf.ensure_shape(values, [None])."
        elif shape.rank == 1:
            remedy = f"The batch has {num_samples} samples: take means over the other dimensions, and not over these."
        raise UsageError(f"{what}the shape {shape}, but each sample needs one value: [n]. {remedy}")
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
        raise UsageError(f"{what}as {tensor.dtype.name}; it must be numbers.")
    return tensor
