"""Callbacks for ``fit`` on several ranks, with the arguments of Horovod's."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import all_gather_object
from ringtrain.collectives.metric_states import (
    MetricState,
    leaf_metrics,
    merge_states,
    require_same_list,
    require_same_metrics,
)
from ringtrain.errors import UsageError
from ringtrain.keras.auditing.session import Audit as Audit
from ringtrain.keras.collective import ProcessSetCollective, broadcast_variables, require_init
from ringtrain.keras.exchange import variable_key
from ringtrain.keras.fit_state import built_optimizers
from ringtrain.keras.guards import say_once
from ringtrain.keras.merged_metrics import count_samples, read_metric_states, read_results, scalars, watch_metrics
from ringtrain.keras.run import Run as Run
from ringtrain.runtime.private import learning_rate_of


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcast the root's weights and optimizer state before the first step.

    A model without a known input shape gets them after its first step. Seed generators keep their state: with equal
    states, all ranks would drop the same units.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        """Prepare the broadcast.

        Args:
            root_rank: source of the broadcast.
            device: TensorFlow device of the operation.
            local_variables: a variable, or variables, that are not broadcast.
        """
        super().__init__()
        self.root_rank, self.device, self.broadcast_done = root_rank, device, False
        if isinstance(local_variables, (tf.Variable, keras.Variable)):
            local_variables = [local_variables]
        self._local: set[Hashable] = set()
        for variable in local_variables or ():
            if not isinstance(variable, (tf.Variable, keras.Variable)):
                raise UsageError(
                    f"local_variables holds {variable!r}, which is no variable. Pass variables of the model, such as "
                    "model.layers[0].variables."
                )
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the broadcast."""
        self._local.add(variable_key(var))

    def on_train_begin(self, logs: Any = None) -> None:
        if self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._broadcast()

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        require_init("BroadcastGlobalVariablesCallback")
        # Keras' "weights" exclude seeds and metrics, which one rank may have created already.
        variables = [variable for variable in self.model.weights if variable_key(variable) not in self._local]
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None and self.model.trainable_variables and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        for built_optimizer in built_optimizers(self.model).values():
            variables += built_optimizer.variables
        with tf.device(self.device):
            broadcast_variables(variables, root_rank=self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Replace an epoch's logs by the values over all ranks.

    The states of the model's metrics are merged, so a metric has the value of one process, also with sample weights,
    masks, AUC or a largest error. A value that belongs to no metric, such as one that a user-defined ``train_step``
    returns, becomes the mean over the samples. Horovod's callback takes the unweighted mean of the ranks' values.

    Put it before callbacks that read the logs. All ranks need the same metrics and the same validation.
    """

    def __init__(self, device: str = "") -> None:
        """Prepare the averages.

        Args:
            device: TensorFlow device of the operation.
        """
        super().__init__()
        self._device = device
        self._train_states: list[MetricState] | None = None  # of this epoch, before its validation

    def on_train_begin(self, logs: Any = None) -> None:
        require_init("MetricAverageCallback")
        if hvd.size() > 1:
            watch_metrics(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._train_states = None

    def on_test_begin(self, logs: Any = None) -> None:
        if self._train_states is None:
            self._train_states = read_metric_states(self.model)  # evaluate() resets them

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        require_init("MetricAverageCallback")
        if logs is None or hvd.size() == 1:
            return
        collective = ProcessSetCollective()
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        require_same_list(names, names, collective, name="metric_average/logs", kind="values in the logs")
        require_same_metrics(leaf_metrics(self.model.metrics), collective, name="metric_average/metrics")
        last_states = read_metric_states(self.model)
        train_states = last_states if self._train_states is None else self._train_states
        train_names = [name for name in names if not name.startswith("val_")]
        self._replace(logs, dict(zip(train_names, train_names, strict=True)), train_states, collective)
        validation_names = {name.removeprefix("val_"): name for name in names if name.startswith("val_")}
        if validation_names:
            self._replace(logs, validation_names, last_states, collective)

    def _replace(
        self,
        logs: dict[str, Any],
        log_names: Mapping[str, str],
        local_states: Sequence[MetricState],
        collective: ProcessSetCollective,
    ) -> None:
        """Replace some of the logs. Collective.

        Args:
            logs: of the epoch.
            log_names: names in the logs, by the names of the metrics.
            local_states: this rank's states, of training or validation.
            collective: of all ranks.
        """
        # A result may be a variable itself, which has the value of the last batches when it is read.
        possible_results = [read_results(self.model, local_states), scalars(self.model.get_metrics_result())]
        belongs = []
        for name, log_name in log_names.items():
            belongs.append(any(_is_close(logs[log_name], results.get(name)) for results in possible_results))
        belongs_by_rank = all_gather_object(collective, belongs, name="metric_average/belongs")
        with tf.device(self._device):
            merged_states = merge_states(local_states, collective, name="metric_average/states")
            merged = read_results(self.model, merged_states, num_ranks=hvd.size())
        others = []
        for index, (name, log_name) in enumerate(log_names.items()):
            if not all(rank_belongs[index] for rank_belongs in belongs_by_rank):
                others.append(log_name)
            elif name in merged:
                logs[log_name] = merged[name]
            else:
                del logs[log_name]  # read_results has warned
        samples = count_samples(local_states)
        if samples is None:  # the model has no mean of the loss: all ranks have equal weights
            samples = 1.0
        self._average_over_samples(logs, others, samples, collective)

    def _average_over_samples(
        self, logs: dict[str, Any], names: Sequence[str], samples: float, collective: ProcessSetCollective
    ) -> None:
        """Replace logs by means over samples; ``samples``: this rank's. Collective."""
        if not names:
            return
        if hvd.rank() == 0:
            say_once(
                f"{', '.join(names)}: no metric of the model has this value, so MetricAverageCallback takes the mean "
                "of the ranks' values, weighted by their numbers of samples"
            )
        values = np.array([logs[name] for name in names], np.float64)
        weighted = values * samples if samples > 0 else np.zeros_like(values)  # the mean of no samples is NaN
        with tf.device(self._device):
            message = tf.constant([*weighted, samples], tf.float64)
            [total] = collective.all_reduce([message], name="metric_average/others")
        sums = total.numpy()
        for name, value in zip(names, sums[:-1], strict=True):
            logs[name] = float(value / sums[-1]) if sums[-1] else float("nan")


def _is_close(value: Any, result: float | None) -> bool:
    """True if a value in the logs is a metric's result, up to rounding."""
    return result is not None and bool(np.isclose(value, result, rtol=1e-4, equal_nan=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to ``initial_lr * multiplier``.

    The velocities of SGD and RMSprop, which contain the old rate, are rescaled (Goyal et al. 2017, section 3, "momentum
    correction").
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Prepare the schedule.

        Args:
            initial_lr: the base rate.
            multiplier: a function of the epoch, or a number for ``multiplier ** (epoch - start_epoch)``.
            start_epoch, end_epoch: first epoch, and the one after the last; None: no end.
            staircase: once per epoch, not each batch with a fractional epoch.
            momentum_correction: rescale velocities.
            steps_per_epoch: required if Keras does not know it.
        """
        super().__init__()
        if initial_lr is None:
            raise UsageError(
                "initial_lr=None must be a number, the rate that is multiplied. Give it, such as initial_lr=0.001."
            )
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.current_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise UsageError(
                    f"{type(self).__name__} needs the number of batches of an epoch, which the data do not show. Pass "
                    "steps_per_epoch."
                )
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        if hasattr(optimizer, "optimizers"):
            raise UsageError(
                f"the optimizer {optimizer.name!r} has a learning rate for each of its parts, and "
                f"{type(self).__name__} changes one. Give each part a schedule of Keras', and leave the callback out."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self.start_epoch <= self.current_epoch < (math.inf if self.end_epoch is None else self.end_epoch):
            return
        if self.staircase:
            if batch == 0:
                self._set_learning_rate(self.current_epoch)
        else:
            assert self.steps_per_epoch is not None
            self._set_learning_rate(self.current_epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._learning_rate()

    def _learning_rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set_learning_rate(self, epoch: float) -> None:
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        if not isinstance(learning_rate_of(optimizer), keras.Variable):
            raise UsageError(
                f"the optimizer {optimizer.name!r} has its own schedule as its learning rate, which "
                f"{type(self).__name__} cannot change. Create the optimizer with a number, or leave the callback out."
            )
        before, now = self._learning_rate(), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = now
        if self.momentum_correction and before > 0 and now != before:
            for velocity in _velocities(optimizer):
                velocity.assign(velocity * (now / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from ``initial_lr / size`` to ``initial_lr`` over the first epochs.

    At epoch e (fractional): ``initial_lr / size * (e * (size - 1) / warmup_epochs + 1)`` (Goyal et al. 2017).
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """Prepare the warm-up.

        Args:
            initial_lr: the full rate.
            warmup_epochs: length of the warm-up.
            momentum_correction, steps_per_epoch: as for ``LearningRateScheduleCallback``.
            verbose: 1 reports the end on rank 0.
        """
        require_init("LearningRateWarmupCallback")
        size = hvd.size()

        def multiplier(epoch: float) -> float:
            epoch += 1 / (self.steps_per_epoch or 1)  # full values at the ends of epochs
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs, self.verbose = warmup_epochs, verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose > 0 and hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._learning_rate():g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras' ModelCheckpoint that keeps only the best model. Set ``filepath`` before training."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        super().__init__(
            filepath="best.weights.h5" if save_weights_only else "best.keras",  # Keras checks the suffix
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: str | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.filepath is None:
            raise UsageError(
                "BestModelCheckpoint has no filepath. Set it on the rank that saves: "
                "callback.filepath = 'best.keras' (or 'best.weights.h5' with save_weights_only=True).",
            )
        super().on_train_begin(logs)


def _velocities(optimizer: keras.optimizers.Optimizer) -> Sequence[keras.Variable]:
    """Slots that contain steps scaled by the learning rate."""
    kinds = {keras.optimizers.SGD: "momentums", keras.optimizers.RMSprop: "_momentums"}
    name = next((name for kind, name in kinds.items() if isinstance(optimizer, kind)), "")
    has_slots = name and optimizer.built and getattr(optimizer, "momentum", 0)
    return [slot for slot in getattr(optimizer, name) if slot is not None] if has_slots else []
