"""The Keras methods that ``ringtrain.keras`` replaces.

- ``Optimizer.apply``, ``MultiOptimizer.apply``: refuse optimizers that are not distributed as a whole.
- ``LossScaleOptimizer.apply``: ``compile`` wraps it *around* a distributed optimizer; gradients must be reduced before
  its check for overflow, or ranks would diverge and deadlock.
- ``Model.make_train_function``: XLA cannot compile the sums; it compiles the rest of a step.
- ``CallbackList.__init__``: add the guards (``guards.py``); callbacks that save come last.
- ``Model.fit``, ``EpochIterator._enumerate_iterator``: ``callbacks.Run``; resume in mid-epoch; hash the first batches.
- ``Model.evaluate``: restore the metrics' counts of a ``fit`` with ``callbacks.Run``.
- ``Trainer._get_metrics_result_or_logs``: a resumed epoch of unknown length may have no batch left.
- ``TFEpochIterator._get_iterator``: with one core per rank, epochs ended late, waiting for tf.data's tuner thread.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import horovod.tensorflow as hvd
import keras
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.trainers.epoch_iterator import EpochIterator

from ringtrain.data.tf_data import without_tuner
from ringtrain.keras.auditing.session import Audit
from ringtrain.keras.collective import is_elastic
from ringtrain.keras.compiled import CompiledStep, notice, why_not_compiled
from ringtrain.keras.distributed import Distributed, apply_reduced, check_parts, find_distributed
from ringtrain.keras.elastic import CommitStateCallback, UpdateBatchStateCallback
from ringtrain.keras.guards import TrainingGuard, check_distributed
from ringtrain.keras.run import Run
from ringtrain.keras.same_samples import first_batches


@functools.cache
def install() -> None:
    _replace(keras.optimizers.Optimizer, "apply", _apply)
    if hasattr(keras.optimizers, "MultiOptimizer"):  # since Keras 3.15
        _replace(keras.optimizers.MultiOptimizer, "apply", _apply_parts)
    _replace(keras.optimizers.LossScaleOptimizer, "apply", _apply_scaled)
    _replace(keras.Model, "make_train_function", _make_train_function)
    _replace(keras.callbacks.CallbackList, "__init__", _create_callback_list)
    _replace(keras.Model, "fit", _fit)
    _replace(keras.Model, "evaluate", _evaluate)
    _replace(EpochIterator, "_enumerate_iterator", _enumerate)
    _replace(keras.Model, "_get_metrics_result_or_logs", _metrics_or_logs)
    _replace(TFEpochIterator, "__init__", _create_epoch_iterator)
    _replace(TFEpochIterator, "_get_iterator", _get_dataset)


def _replace(owner: type, name: str, replacement: Any) -> None:
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(functools.partial(plain, self), self, *args, **kwargs)

    setattr(owner, name, method)


def _apply(plain: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    check_distributed(optimizer)
    return plain(grads, trainable_variables)


def _apply_parts(plain: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    if trainable_variables is not None:
        optimizer.build(list(trainable_variables))  # calls the function that chooses optimizers
    check_parts(optimizer)
    check_distributed(optimizer)
    return plain(grads, trainable_variables)


def _apply_scaled(plain: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    inner = optimizer.inner_optimizer
    if not isinstance(inner, Distributed):
        if hasattr(inner, "optimizers") and trainable_variables is not None:  # must be outside of Keras' cond
            inner.build(list(trainable_variables))
            check_parts(inner)
        return plain(grads, trainable_variables)
    return apply_reduced(inner, optimizer, plain, grads, trainable_variables)


def _make_train_function(plain: Any, model: Any, force: bool = False) -> Any:
    if not (model.jit_compile and _has_ranks()) or (model.train_function and not force):
        return plain(force)
    if why_not := why_not_compiled(model):
        notice(why_not)
    else:
        model.train_step = CompiledStep(model)
    model.jit_compile = False
    try:
        return plain(force)
    finally:
        model.jit_compile = True
        if not why_not:
            del model.train_step


def _create_callback_list(plain: Any, callback_list: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:
    plain(callbacks, *args, **kwargs)
    listed = callback_list.callbacks
    for last in [callback for kind in (CommitStateCallback, Run) for callback in listed if isinstance(callback, kind)]:
        listed.remove(last)
        if isinstance(last, Run):
            last.note_others(listed)
            listed.insert(0, last.before_others())
        listed.append(last)
    if _has_ranks():
        guard = TrainingGuard(has_audit=any(isinstance(callback, Audit) for callback in listed))
        guard.set_model(callback_list.model)
        guard.set_params(callback_list.params)
        callback_list._async_train = callback_list._async_test = False  # else batches may be counted out of order
        listed.insert(0, guard)  # First: its checks must not wait for other callbacks' collectives.
        # Last: others may evaluate when an epoch begins.
        listed.append(keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: first_batches().wait()))


def _fit(plain: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(plain).bind(*args, **kwargs)
    given.apply_defaults()
    callbacks = given.arguments["callbacks"]
    listed = getattr(callbacks, "callbacks", callbacks) or ()
    runs = [
        callback for callback in (listed if isinstance(listed, list | tuple) else [listed]) if isinstance(callback, Run)
    ]
    epochs, initial_epoch = given.arguments["epochs"], given.arguments["initial_epoch"]
    first_batches().begin()
    try:
        with contextlib.ExitStack() as stack:
            for run in runs[:1] if model.compiled else ():  # else Keras reports what is missing
                around = run.around(model, epochs=epochs, initial_epoch=initial_epoch, is_alone=len(runs) == 1)
                stack.enter_context(around)
            return plain(*args, **kwargs)
    finally:
        first_batches().end()
        for callback in listed if isinstance(listed, list | tuple) else [listed]:
            if isinstance(callback, Audit):
                callback.restore()
        distributed = find_distributed(getattr(model, "optimizer", None))
        if distributed is not None:
            distributed.exchange.end_fit()  # Keras does not call on_train_end after an exception


def _evaluate(plain: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    if Run.current is None or kwargs.get("_use_cached_eval_dataset"):  # fit's own validation
        return plain(*args, **kwargs)
    counted = [(variable, keras.ops.convert_to_numpy(variable.value)) for variable in model.metrics_variables]
    try:
        return plain(*args, **kwargs)
    finally:
        for variable, value in counted:
            variable.assign(value)


def _enumerate(plain: Any, data: Any) -> Any:
    fit = Run.current
    if fit is not None and fit.batches.are_of(data):
        steps = fit.batches.enumerate(plain, data)
    else:
        steps = UpdateBatchStateCallback.enumerate(plain, data)
    return first_batches().note(steps, data.steps_per_execution)


def _create_epoch_iterator(plain: Any, data: Any, *args: Any, **kwargs: Any) -> None:
    plain(*args, **kwargs)
    if Run.current is not None:
        Run.current.build_model(data._distributed_dataset.element_spec)


def _get_dataset(plain: Any, data: Any) -> Any:
    fit = Run.current
    return without_tuner(plain(), b"" if fit is None else fit.batches.state_for(data))


def _metrics_or_logs(plain: Any, model: Any, logs: Any) -> Any:
    fit = Run.current
    if fit is None or fit.model is not model or logs:
        return plain(logs)
    return fit.take_logs() or plain(logs)


def _has_ranks() -> bool:
    return hvd.is_initialized() and (hvd.size() > 1 or is_elastic())
