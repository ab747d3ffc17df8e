"""The variables of a ``fit`` that are equal on all ranks: weights, and the state of every optimizer of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from ringtrain.collectives.gradients import GradientReduction
from ringtrain.errors import UsageError
from ringtrain.run.held_variables import COMPILED_OPTIMIZER, find_optimizers
from ringtrain.run.variables import name_variables, named_slots, named_weights


def built_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Return the optimizers that have variables, by path; first the compiled one."""
    built = {}
    for path, optimizer in find_optimizers(model).items():
        if optimizer.built:
            built[path] = optimizer
    return built


def name_state(model: keras.Model, optimizers: Mapping[str, keras.optimizers.Optimizer]) -> dict[str, keras.Variable]:
    """Name weights and slots as in a checkpoint: ``weights/...``, ``slots/...``, ``optimizers/g_opt/...``."""
    kinds = {"weights": named_weights(model)}
    for path, optimizer in optimizers.items():
        if path == COMPILED_OPTIMIZER:
            kinds["slots"] = named_slots(optimizer)
        else:
            kinds[f"optimizers/{path}"] = named_slots(optimizer)
    return name_variables(**kinds)


def build_other_optimizers(model: keras.Model, batch_spec: Any) -> None:
    """Create the variables of all optimizers that a user-defined ``train_step`` applies, by tracing one step.

    Args:
        model: built, and its compiled optimizer too.
        batch_spec: ``tf.TensorSpec`` of a batch, in the structure that ``train_step`` gets.

    Raises:
        UsageError: the step cannot be traced, so that a checkpoint could not be restored before the first step.
    """
    unbuilt = [path for path, optimizer in find_optimizers(model).items() if not optimizer.built]
    if not unbuilt:
        return
    reductions_before = GradientReduction.calls
    try:
        trace_train_step(model.train_step, batch_spec)
    except UsageError:
        raise
    except Exception as error:  # in user-defined code
        first_line = (str(error).splitlines() or [""])[0]
        path = unbuilt[0]
        raise UsageError(
            f"callbacks.Run restores all optimizers of a model, and model.{path} has no variables before its first "
            f"step. {type(model).__name__}.train_step cannot be traced to create them ({type(error).__name__}: "
            f"{first_line}). Before fit(), call model.{path}.build(variables) with the variables that it trains."
        ) from error
    finally:
        # The guards count the reductions of real steps.
        GradientReduction.calls = reductions_before


def create_metrics(model: keras.Model, batch_spec: Any) -> None:
    """Create the variables of metrics that Keras creates in the first step, by tracing one.

    Nothing is created if the step cannot be traced, such as that of a model that runs eagerly.

    Args:
        model: built, and all its optimizers too.
        batch_spec: ``tf.TensorSpec`` of a batch, in the structure that ``train_step`` gets.
    """
    if model.run_eagerly or batch_spec is None:
        return
    reductions_before = GradientReduction.calls
    try:
        trace_train_step(model.train_step, batch_spec)
    except Exception:  # from user-defined code: the first step reports it
        return
    finally:
        # The guards count the reductions of real steps.
        GradientReduction.calls = reductions_before


def call_after_eager_step(model: keras.Model, action: Callable[[], None]) -> None:
    """Call ``action`` after the next step of a model that runs eagerly, before others of the same call.

    ``steps_per_execution`` steps are one call.
    """
    own = vars(model).get("train_step")
    plain = model.train_step
    is_called = False

    def step(data: Any) -> Any:
        nonlocal is_called
        logs = plain(data)
        if not is_called:
            is_called = True
            action()
        return logs

    model.train_step = step
    model.make_train_function(force=True)  # it holds the step
    del model.train_step
    if own is not None:
        model.train_step = own


def trace_train_step(train_step: Callable[[Any], Any], batch_spec: Any) -> Any:
    """Trace one step of a model as a graph, without a computation. Return TensorFlow's concrete function.

    Args:
        train_step: of a compiled model.
        batch_spec: tensors or ``tf.TensorSpec`` of a batch, in the structure that ``train_step`` gets.
    """

    def step(batch: Any) -> Any:
        return train_step(tf.nest.map_structure(_without_optional, batch))

    return tf.function(step, autograph=False).get_concrete_function(batch_spec)


def _without_optional(value: Any) -> Any:
    """Keras' adapters send a missing part of a batch, such as sample weights, as an Optional."""
    return None if isinstance(value, tf.experimental.Optional) else value
