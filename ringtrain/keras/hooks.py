"""What ``ringtrain.keras`` replaces in Keras, as it has no public way to do the same.

- ``Optimizer.apply``, ``MultiOptimizer.apply``: refuse optimizers that are not distributed as a whole. Only ``apply``
  is common to ``fit`` and custom loops.
- ``LossScaleOptimizer.apply``: ``Trainer.compile`` (``auto_scale_loss``) wraps it *around* a distributed optimizer;
  gradients must be reduced before its check for overflow, or ranks would diverge and deadlock.
- ``Model.make_train_function``: with ``jit_compile`` Keras compiles the whole ``one_step_on_data``. XLA cannot compile
  the sums; it compiles the rest of a step.
- ``CallbackList.__init__``: add the guards (``guards.py``); callbacks that save come last, also after those that
  ``_add_default_callbacks`` adds.
- ``Model.fit``: ``callbacks.Run`` begins before Keras reads the data, and a failed ``fit`` calls no callback.
- ``Model.evaluate``: called by a callback within a ``fit``, keep the states of the metrics, of which ``callbacks.Run``
  logs means and ``MetricAverageCallback`` takes values, also if it fails.
- ``Trainer._get_metrics_result_or_logs``: a resumed epoch of unknown length may have no batch left, and Keras asks for
  its metrics before any callback.
- ``TFEpochIterator``, which ``Model.fit`` creates by name: ``EpochIterator`` below.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import horovod.tensorflow as hvd
import keras
from keras.src.backend.tensorflow import trainer

from ringtrain.data.tf_data import without_tuner
from ringtrain.errors import UsageError
from ringtrain.keras.auditing.session import Audit
from ringtrain.keras.collective import is_elastic, log
from ringtrain.keras.distributed import (
    OUTER,
    Distributed,
    apply_reduced,
    check_parts,
    find_distributed,
    wrap_method,
)
from ringtrain.keras.elastic import CommitStateCallback, UpdateBatchStateCallback
from ringtrain.keras.guards import TrainingGuard, check_distributed, first_batches
from ringtrain.keras.run import Run
from ringtrain.keras.writers import refuse_with_run, restoring_silenced
from ringtrain.runtime.private import all_layers, element_spec_of, forbid_asynchronous_callbacks
from ringtrain.step.compiled import CompiledFunction
from ringtrain.step.local_gradients import with_known_rows


@functools.cache
def install() -> None:
    replacements: list[tuple[type, str, Any]] = [
        *((owner, "apply", _apply) for owner in (keras.optimizers.Optimizer, *OUTER)),
        (keras.Model, "make_train_function", _make_train_function),
        (keras.callbacks.CallbackList, "__init__", _create_callback_list),
        (keras.Model, "fit", _fit),
        (keras.Model, "evaluate", _evaluate),
        (keras.Model, "_get_metrics_result_or_logs", _metrics_or_logs),
    ]
    for owner, name, replacement in replacements:
        setattr(owner, name, wrap_method(owner, name, replacement))
    trainer.TFEpochIterator = EpochIterator


def _apply(plain: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    grads = list(grads)
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    inner = optimizer.inner_optimizer if is_scaled else optimizer
    if is_scaled and isinstance(inner, Distributed):
        return apply_reduced(inner, optimizer, functools.partial(plain, optimizer), grads, trainable_variables)
    if hasattr(inner, "optimizers"):
        if trainable_variables is not None:  # call the function that chooses optimizers, outside of Keras' cond
            inner.build(list(trainable_variables))
        check_parts(inner)
    if not is_scaled:
        check_distributed(optimizer, grads)
    return plain(optimizer, grads, trainable_variables)


def _make_train_function(plain: Any, model: Any, force: bool = False) -> Any:
    if not (model.jit_compile and _has_ranks()) or (model.train_function and not force):
        return plain(model, force)
    if why_not := why_not_compiled(model):
        notice(why_not)
    else:
        model.train_step = CompiledStep(model)
    model.jit_compile = False
    try:
        return plain(model, force)
    finally:
        model.jit_compile = True
        if not why_not:
            del model.train_step


def _create_callback_list(plain: Any, callback_list: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:
    plain(callback_list, callbacks, *args, **kwargs)
    listed = callback_list.callbacks
    if any(isinstance(callback, Run) for callback in listed):
        refuse_with_run(listed)
    for last in [callback for kind in (CommitStateCallback, Run) for callback in listed if isinstance(callback, kind)]:
        listed.remove(last)
        if isinstance(last, Run):
            listed.insert(0, last.before_others(listed))
        listed.append(last)
    if _has_ranks():
        has_audit = any(isinstance(callback, Audit) for callback in listed)
        guard = TrainingGuard(has_audit=has_audit, callbacks=listed)
        guard.set_model(callback_list.model)
        guard.set_params(callback_list.params)
        forbid_asynchronous_callbacks(callback_list)
        listed.insert(0, guard)  # First: its checks must not wait for other callbacks' collectives.
        # Last: others may evaluate when an epoch begins.
        listed.append(keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: first_batches().wait()))


def _fit(plain: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(plain).bind(model, *args, **kwargs)
    given.apply_defaults()
    callbacks, epochs, initial_epoch = (given.arguments[name] for name in ("callbacks", "epochs", "initial_epoch"))
    listed = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks) or [])
    runs = [callback for callback in listed if isinstance(callback, Run)]
    first_batches().begin()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(restoring_silenced())
            for run in runs[:1] if model.compiled else ():  # else Keras reports what is missing
                around = run.around(model, epochs=epochs, initial_epoch=initial_epoch, is_alone=len(runs) == 1)
                stack.enter_context(around)
            return plain(model, *args, **kwargs)
    finally:
        first_batches().end()
        for callback in listed:
            if isinstance(callback, Audit):
                callback.restore()
        distributed = find_distributed(getattr(model, "optimizer", None))
        if distributed is not None:
            distributed.exchange.end_fit()  # Keras does not call on_train_end after an exception


def _evaluate(plain: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    if not first_batches().is_in_fit or kwargs.get("_use_cached_eval_dataset"):  # fit's own validation
        return plain(model, *args, **kwargs)
    counted = [(variable, keras.ops.convert_to_numpy(variable.value)) for variable in model.metrics_variables]
    try:
        return plain(model, *args, **kwargs)
    finally:
        for variable, value in counted:
            variable.assign(value)


def _metrics_or_logs(plain: Any, model: Any, logs: Any) -> Any:
    fit = Run.current
    if fit is None or fit.model is not model or logs:
        return plain(model, logs)
    return fit.take_logs() or plain(model, logs)


class EpochIterator(trainer.TFEpochIterator):
    """Keras' loop over the data of ``fit``, ``evaluate`` and ``predict``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """A model without ``keras.Input`` needs weights before a restore."""
        super().__init__(*args, **kwargs)
        batch_spec = element_spec_of(self)
        if first_batches().is_in_fit and first_batches().batch_spec is None:  # that of the training comes first
            first_batches().batch_spec = batch_spec
        if Run.current is not None:
            Run.current.build_model(batch_spec)

    def _get_iterator(self) -> Any:
        """With one core per rank, epochs ended late, waiting for tf.data's tuner thread."""
        fit = Run.current
        return without_tuner(super()._get_iterator(), b"" if fit is None else fit.batches.state_for(self))

    def _enumerate_iterator(self) -> Iterator[Any]:
        """Resume in mid-epoch; hash the first batches."""
        fit, plain = Run.current, super()._enumerate_iterator
        if fit is not None and fit.batches.are_of(self):
            steps = fit.batches.enumerate(plain, self)
        else:
            steps = UpdateBatchStateCallback.enumerate(plain, self)
        return first_batches().note(steps, self.steps_per_execution)


def _has_ranks() -> bool:
    return hvd.is_initialized() and (hvd.size() > 1 or is_elastic())


class CompiledStep:
    """A training step whose forward and backward pass XLA compiles, but not the sums and the update."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._plain = model.train_step
        self._function = CompiledFunction(self._compute)
        self._is_checked = False

    def __call__(self, data: Any) -> Any:
        gradients, metrics = self._function(data)
        if not self._is_checked:
            self._require_supported_operations()
            self._is_checked = True
        weights = self._model.trainable_weights
        gradients = list(map(with_known_rows, gradients, weights))
        self._model.optimizer.apply(gradients, weights)
        return metrics

    def _require_supported_operations(self) -> None:
        """Refuse operations that XLA lacks while the step is traced, before ranks wait for sums."""
        if unsupported := self._function.find_unsupported():
            raise UsageError(
                "fit with jit_compile=True (on a GPU also by default): XLA cannot compile "
                f"{unsupported}. Train without XLA: model.compile(..., jit_compile=False)."
            )

    def _compute(self, data: Any) -> tuple[list[Any], Any]:
        """Return gradients, captured from the optimizer, and metrics."""
        optimizer, found = self._model.optimizer, list[Any]()
        optimizer.apply = lambda gradients, variables=None: found.extend(gradients)
        try:
            metrics = self._plain(data)
        finally:
            del optimizer.apply
        return found, metrics


def why_not_compiled(model: Any) -> str:
    if "train_step" in vars(model) or not type(model).train_step.__module__.startswith("keras."):
        return f"{type(model).__name__} has its own train_step, in which ranks may sum"
    if any(getattr(layer, "needs_every_rank", False) for layer in all_layers(model)):
        return "a layer asks the other ranks within its forward pass"
    return ""


@functools.cache
def notice(why_not: str) -> None:
    if hvd.rank() == 0:
        log.warning(
            "ringtrain.keras: the training step runs without XLA: %s. Pass jit_compile=False to compile() to say so "
            "yourself.",
            why_not,
        )
