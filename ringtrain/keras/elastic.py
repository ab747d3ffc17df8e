"""Elastic training: the run continues when ranks leave or join, without a restart.

    @hvd.elastic.run
    def train(state):
        model.fit(batches, initial_epoch=state.epoch, epochs=90, callbacks=[
            hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
        ])

    train(hvd.elastic.KerasState(model, batch=0, epoch=0))

Start it by ``horovodrun --min-np N --host-discovery-script ...``. The interface is that of
``horovod.tensorflow.keras.elastic``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError

from ringtrain.errors import RingtrainError, UsageError
from ringtrain.guard import causes
from ringtrain.keras.collective import broadcast_variables, log
from ringtrain.keras.distributed import find_distributed
from ringtrain.messages.defects import describe_defect
from ringtrain.run.held_variables import (
    COMPILED_OPTIMIZER,
    find_optimizers,
    find_variables,
    variable_id,
)
from ringtrain.runtime.private import count_steps

# In an error of a failed sum: the operation, or a library below Horovod.
LOST_SIGNS = (*causes.LOST_SIGNS, "Horovod", "gloo/", "NCCL")


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function of a state again whenever ranks have left or joined.

    Before each call all ranks get rank 0's state: the last commit if a rank was lost, the current state if hosts were
    added. If hosts were only removed, each keeps its own. Call no collective before the function: a joining rank would
    deadlock. Create your ``tf.function`` inside it.
    """

    def call(state: Any, *args: Any, **kwargs: Any) -> Any:
        with telling_lost_ranks():
            return func(state, *args, **kwargs)

    return run_fn(functools.wraps(func)(call), rejoin)


def rejoin() -> None:
    """Restart Horovod among the current ranks.

    Raises:
        RingtrainError: Horovod did not start.
    """
    for is_last in (False, True):
        hvd.shutdown()
        try:
            hvd.init()
            return
        except Exception as error:  # the class depends on Horovod's controller
            if is_last:
                raise RingtrainError(
                    f"this rank could not join the others again after ranks had changed: {describe_defect(error)} "
                    "horovodrun starts it again if the host stays and --reset-limit allows it."
                ) from error


@contextlib.contextmanager
def telling_lost_ranks() -> Iterator[None]:
    """Convert errors of lost ranks to Horovod's, so that the other ranks continue."""
    try:
        yield
    except tf.errors.UnknownError as error:  # Horovod's class for a lost rank; wrong use has others
        if not any(sign in str(error) for sign in LOST_SIGNS):
            raise
        log.warning(
            "ringtrain.keras: rank %d lost another: it restores its last commit, and continues with the others. %s",
            hvd.rank(),
            str(error).strip().splitlines()[-1],
        )
        raise HorovodInternalError(str(error)) from error


class KerasState(ObjectState):
    """State that survives the loss of a rank: model, optimizer and user-defined attributes.

    ``commit()`` saves it in memory and checks for changed hosts; ``restore()`` undoes changes since then; ``sync()``
    broadcasts rank 0's state.
    """

    def __init__(self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None, **kwargs: Any) -> None:
        """Save a state; ``kwargs`` become attributes, such as ``batch=0, epoch=0``, which callbacks update.

        Args:
            model: a built model.
            optimizer: default: the compiled one.

        Raises:
            UsageError: the model has no weights, or no optimizer, or an optimizer has no variables.
        """
        optimizer = optimizer or getattr(model, "optimizer", None)
        if not model.built:
            raise UsageError(
                f"KerasState: the model {model.name!r} has no weights before its first step, and a rank that joins "
                "would have none to receive. Begin it with keras.Input(shape), or call model.build(shape)."
            )
        if optimizer is None:
            raise UsageError("KerasState: the model has no optimizer. Compile it before, or pass optimizer=...")
        self.model, self.optimizer = model, optimizer
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self._require_built_optimizers()
        self._saved: list[tuple[keras.Variable | tf.Variable, tf.Tensor]] = []
        self._save_variables()
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)

    def save(self) -> None:
        """Save the current state, without ``commit``'s check for hosts."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """Undo all changes since the last ``save``."""
        for variable, value in self._saved:
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Broadcast rank 0's state and save it. Seeds are not broadcast."""
        with telling_lost_ranks():  # another rank may be lost during the broadcast
            optimizer_variables = []
            for optimizer in self._optimizers().values():
                optimizer_variables += optimizer.variables
            broadcast_variables(self.model.weights + optimizer_variables, root_rank=0)
            self._save_variables()
            super().sync()

    def reset(self) -> None:
        """Discard accumulated gradients and the traced step of the former ranks."""
        distributed = find_distributed(self.optimizer)
        if distributed is not None and distributed._agg_helper is not None:
            distributed._agg_helper.clear()
        self.model.train_function = None

    def _optimizers(self) -> dict[str, keras.optimizers.Optimizer]:
        """Return this state's optimizer, and all others of the model, by path."""
        optimizers = {"": self.optimizer}
        for path, optimizer in find_optimizers(self.model).items():
            if optimizer is not self.optimizer and path != COMPILED_OPTIMIZER:
                optimizers[path] = optimizer
        return optimizers

    def _require_built_optimizers(self) -> None:
        for path, optimizer in self._optimizers().items():
            if not optimizer.built:
                raise UsageError(
                    f"KerasState: model.{path} has no variables before its first step, and a rank that joins would "
                    f"have none to receive. Before, call model.{path}.build(variables) with the variables that it "
                    "trains."
                )

    def _save_variables(self) -> None:
        """Keep copies of all variables that training may change, on this rank."""
        by_id: dict[int, keras.Variable | tf.Variable] = {}
        for owner in (self.model, self.optimizer):
            for variable in find_variables(owner).values():
                by_id[variable_id(variable)] = variable
        for variable in self.model.variables + self.optimizer.variables:
            by_id[variable_id(variable)] = variable
        self._saved = []
        for variable in by_id.values():
            value = variable.value if isinstance(variable, keras.Variable) else variable
            self._saved.append((variable, tf.identity(value)))


class CommitStateCallback(keras.callbacks.Callback):
    """Commit a state every ``batches_per_commit`` batches and after each epoch, always after all other callbacks."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise UsageError(
                f"batches_per_commit={batches_per_commit} must be at least 1: batches between two commits."
            )
        self.state, self.batches_per_commit = state, batches_per_commit
        self._done = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._done = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        former, self._done = self._done, batch + 1  # steps_per_execution may skip batches
        is_last = self._done >= (self.params.get("steps") or self._done + 1)
        if self._done // self.batches_per_commit > former // self.batches_per_commit and not is_last:
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Store an epoch's finished batches in ``state.batch``; 0 between epochs.

    With ``steps_per_epoch``, the first epoch after a reset runs only the remaining steps; otherwise it starts again.
    """

    _awaits: ClassVar[UpdateBatchStateCallback | None] = None  # whose partly trained epoch begins

    def __init__(self, state: Any) -> None:
        super().__init__()
        require_attribute(state, "batch", self)
        self.state = state
        self._is_first_epoch, self._done_before = True, 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._is_first_epoch = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._done_before = 0
        UpdateBatchStateCallback._awaits = self if self._is_first_epoch and self.state.batch else None
        self._is_first_epoch = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = self._done_before + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0

    @classmethod
    def enumerate(cls, plain: Callable[[], Iterator[Any]], data: Any) -> Iterator[Any]:
        awaits = cls._awaits
        if awaits is None or data.steps_per_epoch is None or data.steps_per_epoch != awaits.params.get("steps"):
            return plain()  # an evaluation
        cls._awaits = None
        return awaits._enumerate_rest(plain, data)

    def _enumerate_rest(self, plain: Callable[[], Iterator[Any]], data: Any) -> Iterator[Any]:
        params = self.params  # of this fit, as the generator may be closed in the next
        steps, done = data.steps_per_epoch, self.state.batch
        self._done_before = done
        data.steps_per_epoch = params["steps"] = max(1, steps - done)
        try:
            for numbers in plain():
                if numbers[0] == 0:
                    count_steps(data, done)  # count them, so that data that end with the epoch restart with it
                yield numbers
        finally:
            data.steps_per_epoch = params["steps"] = steps


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Store the number of finished epochs, over all resets, in ``state.epoch``."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        require_attribute(state, "epoch", self)
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch += 1


def require_attribute(state: Any, name: str, callback: keras.callbacks.Callback) -> None:
    """Raise UsageError if the state lacks it."""
    if not hasattr(state, name):
        raise UsageError(
            f"{type(callback).__name__} keeps state.{name}, which the state has not. Make it with KerasState(model, "
            f"{name}=0)."
        )
