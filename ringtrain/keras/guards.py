"""Guards of ``fit`` against divergent ranks, wrong settings, deadlocks and the same samples on several ranks."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import all_gather_object
from ringtrain.collectives.connect import require_working_sums
from ringtrain.collectives.gradients import GradientReduction
from ringtrain.data.sources import bytes_of
from ringtrain.data.tf_data import without_tuner
from ringtrain.errors import ReplicasDifferError, RingtrainError, UsageError
from ringtrain.guard.preflight import describe_layers, digest
from ringtrain.guard.replicas import describe_drift, hash_bits
from ringtrain.keras.collective import (
    ProcessSetCollective,
    all_ranks,
    describe_communication,
    log,
    require_same_kinds,
    wants_native_sums,
)
from ringtrain.keras.distributed import Distributed, find_distributed, is_applying
from ringtrain.keras.exchange import Exchange
from ringtrain.keras.exchanged_tensors import Reduced
from ringtrain.keras.fit_state import trace_train_step
from ringtrain.keras.writers import Writers, refuse_restores, shared_targets
from ringtrain.messages.ranks import name_ranks
from ringtrain.run.held_variables import COMPILED_OPTIMIZER, find_optimizers
from ringtrain.runtime import activity
from ringtrain.runtime.activity import Phase
from ringtrain.runtime.devices import own_gpu
from ringtrain.runtime.private import all_layers


def check_distributed(optimizer: Any, gradients: Sequence[Any]) -> None:
    """Refuse an optimizer that updates only this rank's model. Called while its first step is traced.

    It raises if this process, or for weights of an earlier distributed ``fit``, this ``fit``, has reduced no gradients,
    nor tensors of their shapes by ``hvd.allreduce``.
    """
    # Gradients may be reduced already, or the model be this rank's own.
    may_apply_alone = GradientReduction.calls > TrainingGuard.earlier_reductions
    if isinstance(optimizer, Distributed) or is_applying.get() or may_apply_alone:
        return
    if not hvd.is_initialized() or hvd.size() == 1:
        return
    shapes = {tuple(gradient.shape) for gradient in gradients if gradient is not None}
    if shapes <= Reduced.shapes:
        return
    raise UsageError(
        f"the optimizer {optimizer.name!r} ({type(optimizer).__name__}) is not distributed: each of the {hvd.size()} "
        "ranks would train its own model. Wrap it before compile() or the first step: "
        "optimizer = hvd.DistributedOptimizer(optimizer). If each rank is to have its own model, say so: "
        "hvd.PartialDistributedOptimizer(optimizer, local_layers=model.layers, scale_local_gradients=False)."
    )


class TrainingGuard(keras.callbacks.Callback):
    """Keeps the ranks of a distributed ``fit`` consistent.

    It compares plans and tests sums before training, and weights and decisions to stop after each epoch. A rank that
    ends early contributes zeros until all have joined; then the numbers of batches are compared.
    """

    earlier_reductions: ClassVar[int] = 0  # before this fit, if an earlier distributed one has trained its weights
    batches_before: ClassVar[int] = 0  # of the resumed epoch; set by callbacks.Run
    trained_together: ClassVar[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()
    trained_by_tape: ClassVar[weakref.WeakSet[keras.Model]] = weakref.WeakSet()

    def __init__(self, *, has_audit: bool = False, callbacks: Sequence[keras.callbacks.Callback] = ()) -> None:
        """``callbacks``: the others of this fit."""
        super().__init__()
        self._has_audit = has_audit
        self._writers = Writers(callbacks)
        self._collective: ProcessSetCollective | None = None  # None: this fit is not distributed
        self._exchange: Exchange | None = None
        self._num_batches = self._num_epochs = self._reductions_before = 0
        self._traced_step: Any = None  # its graph lives as long as this

    def on_train_begin(self, logs: Any = None) -> None:
        self._reductions_before = GradientReduction.calls
        distributed = find_distributed(self.model.optimizer)
        self._exchange = distributed.exchange if distributed else None
        weights = {id(weight): weight for weight in self.model.trainable_variables}
        are_trained = weights.keys() & self.trained_together.keys()
        TrainingGuard.earlier_reductions = self._reductions_before if are_trained else 0
        if self._exchange is not None:
            self.trained_together.update(weights)
        self._collective = self._connect()
        if self._exchange is None and type(self.model).train_step is not keras.Model.train_step:
            # Its tape may reduce, so that all ranks train one model; only a step shows it.
            refuse_restores([self._writers.restores()], [hvd.rank()])
        if self._collective is not None:
            self._require_same_plan(self._collective)
            self._share_files(self._collective)
            require_working_sums(self._collective, own_gpu())
        if self._exchange is not None:
            may_sum_natively = self._collective is not None and self._may_sum_natively(self._collective)
            is_traced_otherwise = self._exchange.begin_fit(may_sum_natively=may_sum_natively)
            if is_traced_otherwise and self.model.train_function is not None:
                self.model.make_train_function(force=True)
        self._num_epochs = 0

    def _share_files(self, collective: ProcessSetCollective) -> None:
        """Refuse callbacks that restore ranks separately; let one rank write a file. Collective."""
        mine = [self._writers.restores(), self._writers.targets()]
        restores, targets = zip(*all_gather_object(collective, mine, name="guard_files"), strict=True)
        refuse_restores(restores, collective.ranks)
        position = list(collective.ranks).index(hvd.rank())
        self._writers.leave_to_first(targets, position)
        if position == 0:
            for target in shared_targets(targets):
                say_once(f"{target} is written by one rank only, though several ranks have the callback")

    def _may_sum_natively(self, collective: ProcessSetCollective) -> bool:
        """Decide on native sums, and connect the ranks for the first. Collective."""
        assert self._exchange is not None
        why_not = self._exchange.settings.why_horovod
        if self.params.get("steps") is None:
            # A rank without any batch would not know the sums to join.
            why_not = "the steps of an epoch are unknown"
        may_sum_natively = wants_native_sums() and not why_not
        carrier = all_ranks() if may_sum_natively else collective
        if hvd.rank() == collective.ranks[0]:
            would_be_native = wants_native_sums() and own_gpu() is None
            say_once(describe_communication(carrier, why_not if would_be_native else ""))
        return may_sum_natively

    def on_train_end(self, logs: Any = None) -> None:
        TrainingGuard.earlier_reductions = 0
        if self._exchange is not None:
            self._exchange.end_fit()
        self._require_same_way_on(None)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._require_same_way_on(epoch)
        self._num_epochs += 1
        self._num_batches, TrainingGuard.batches_before = TrainingGuard.batches_before, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._exchange is not None:
            self._exchange.begin_batch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._num_batches = batch + 1
        if (note := activity.current()[0]).doing == Phase.STEP:  # callbacks.Run
            activity.set_phase(Phase.CALLBACKS, note.step)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._collective is None:
            if self._exchange is None and GradientReduction.calls > self._reductions_before:  # by a user's tape
                self.trained_by_tape.add(self.model)  # only a trace shows it
            if self._exchange is None and self.model in self.trained_by_tape and Exchange.spans_world:
                self._require_same_weights(ProcessSetCollective(), epoch)
            return
        assert self._exchange is not None
        spans_world = self._exchange.settings.process_set.process_set_id == 0  # all ranks take part in the join
        if self.params.get("steps") is None or spans_world:
            self._learn_sums()
            with activity.meeting():
                self._exchange.join(had_batch=self._num_batches > 0)
            mine = [self._num_batches, first_batches().hashes]
            numbers, hashes = zip(*all_gather_object(self._collective, mine, name="guard_batches"), strict=True)
            _require_equal(numbers, self._collective.ranks, f"numbers of batches in epoch {epoch + 1}", BATCHES_REMEDY)
            if hvd.rank() == 0 and spans_world and (twice := find_same(hashes)):
                warn_of_same(tuple(twice))
        self._require_same_weights(self._collective, epoch)

    def _learn_sums(self) -> None:
        """On a rank that has had no batch, trace the step: other ranks wait for its part of their sums.

        Before 3.16 Keras has traced the step already, together with the read of the batch.
        """
        assert self._exchange is not None
        batch_spec = first_batches().batch_spec
        is_unknown = self._num_batches == 0 and not self._exchange.knows_sums
        if is_unknown and batch_spec is not None and not self.model.run_eagerly:
            self._traced_step = trace_train_step(self.model.train_step, batch_spec)

    def _connect(self) -> ProcessSetCollective | None:
        if self._exchange is None:
            return None
        process_set = self._exchange.settings.process_set
        is_alone = not process_set.included() or process_set.size() == 1
        if is_alone or (self.model.built and not self._shared_weights()):
            return None
        return ProcessSetCollective(process_set=process_set)

    def _require_same_way_on(self, epoch: int | None) -> None:
        """Check that all ranks begin the same epoch, or all end (None). Collective."""
        if self._collective is None:
            return
        ranks = self._collective.ranks
        epochs = all_gather_object(self._collective, epoch, name="guard_way_on")
        ended = [rank for rank, begun in zip(ranks, epochs, strict=True) if begun is None]
        if ended and len(ended) < len(ranks):
            raise UsageError(
                f"{name_ranks(ended)} stopped after {self._num_epochs} epochs of fit(), and the others continue: they "
                f"would wait for ever. {STOP_REMEDY if self._num_epochs else EPOCH_REMEDY}"
            )
        if not ended:
            numbers = [begun + 1 for begun in epochs]
            _require_equal(numbers, ranks, "first epochs" if not self._num_epochs else "epochs", EPOCH_REMEDY)

    def _require_same_plan(self, collective: ProcessSetCollective) -> None:
        layers = describe_layers(self.model, lambda layer: any(map(self._is_local, layer.trainable_variables)))
        lengths = [self.params.get("steps"), self.params.get("epochs")]
        mine = [*lengths, self._has_audit, describe_compiled(self.model), digest(layers)]
        plans = all_gather_object(collective, mine, name="guard_plan")
        steps, epochs, audits, compiled, digests = zip(*plans, strict=True)
        _require_equal(steps, collective.ranks, "numbers of batches in an epoch", BATCHES_REMEDY)
        _require_equal(epochs, collective.ranks, "numbers of epochs", "Pass the same epochs to fit() on every rank.")
        _require_equal(audits, collective.ranks, "callbacks.Audit", "Pass it to fit() on every rank, or on none.")
        rates = [its.pop("learning rates") for its in compiled]
        if len(set(rates)) > 1 and hvd.rank() == collective.ranks[0]:
            log.warning(
                "ringtrain.keras: the ranks have different learning rates (%s). All get that of the root, which "
                "broadcasts its first values (callbacks.Run: rank 0).",
                _list_values(rates, collective.ranks),
            )
        for what in compiled[0]:
            _require_equal([its.get(what) for its in compiled], collective.ranks, what, COMPILED_REMEDY)
        if len(set(digests)) > 1:
            settings = all_gather_object(collective, layers, name="guard_layers")
            for values in itertools.zip_longest(*settings, fillvalue="nothing"):
                _require_equal(values, collective.ranks, "settings of layers", COMPILED_REMEDY)
        require_same_kinds(self._shared_weights(), collective, purpose="to train")

    def _require_same_weights(self, collective: ProcessSetCollective, epoch: int) -> None:
        weights, ranks, node = self._shared_weights(), collective.ranks, collective.world.node
        mine = [[hash_bits(weight.numpy()) for weight in weights], node, read_rate(self.model.optimizer)]
        hashes, nodes, rates = zip(*all_gather_object(collective, mine, name="guard_weights"), strict=True)
        remedy = "Create and build the same model on every rank."
        _require_equal(list(map(len, hashes)), ranks, "numbers of weights", remedy)
        _require_equal(rates, ranks, f"learning rates after epoch {epoch + 1}", RATE_REMEDY, ReplicasDifferError)
        drift = describe_drift([w.path for w in weights], hashes, dict(zip(ranks, nodes, strict=True)), ranks)
        if drift:
            raise ReplicasDifferError(
                f"the ranks have different weights after epoch {epoch + 1}: {drift}. Start all ranks from the same "
                "ones: pass hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit(). Layers that are to differ are "
                "named by hvd.PartialDistributedOptimizer(local_layers=...)."
            )

    def _shared_weights(self) -> list[keras.Variable]:
        return [weight for weight in self.model.trainable_variables if not self._is_local(weight)]

    def _is_local(self, weight: keras.Variable) -> bool:
        return (self._exchange.is_local if self._exchange else Exchange.is_local_somewhere)(weight)


@functools.cache
def say_once(line: str) -> None:
    """Print: the logger shows warnings only."""
    print(f"ringtrain.keras: {line}", file=sys.stderr, flush=True)


STOP_REMEDY = (
    "A callback that sets model.stop_training, such as EarlyStopping, has to do so on all ranks: by metrics that are "
    "averaged, with hvd.callbacks.MetricAverageCallback() before it."
)
BATCHES_REMEDY = (
    "Ranks with more would wait for the others for ever. Give every rank as many: steps_per_epoch=N with a data set "
    f"that repeats, or as many samples on each rank. {STOP_REMEDY}"
)


EPOCH_REMEDY = (
    "Pass the same initial_epoch to fit() on every rank, from a value that all ranks share (hvd.broadcast_object). "
    "callbacks.Run resumes all ranks together."
)
RATE_REMEDY = (
    "A callback that changes the learning rate, such as ReduceLROnPlateau, has to do so on all ranks: pass it to fit() "
    "on every rank, and if it goes by metrics, with hvd.callbacks.MetricAverageCallback() before it."
)
COMPILED_REMEDY = "Compile the same model with the same optimizer on every rank: all ranks apply the same update."


def describe_compiled(model: keras.Model) -> dict[str, Any]:
    """Return facts of the compiled model that are equal on all ranks, by the words of a message."""
    policies = sorted({layer.dtype_policy.name for layer in all_layers(model)})
    facts: dict[str, Any] = {"optimizers": "", "learning rates": None, "dtype policies": ", ".join(policies)}
    for path, outer in find_optimizers(model).items():
        inner = getattr(outer, "inner_optimizer", None)
        kinds = [optimizer.__class__.__name__ for optimizer in (outer, inner) if optimizer is not None]
        is_compiled = path == COMPILED_OPTIMIZER
        name = "the optimizer" if is_compiled else f"the optimizer {path}"
        if is_compiled:
            facts["optimizers"] = " of ".join(kinds)
            facts["learning rates"] = read_rate(outer)
        else:
            facts[f"classes of {name}"] = " of ".join(kinds)
            facts[f"learning rates of {name}"] = read_rate(outer)
        for setting, value in read_settings(inner or outer).items():
            facts[f"values of {setting} in {name}"] = value
    return facts


def read_settings(optimizer: Any) -> dict[str, str]:
    try:
        plain = json.dumps(optimizer.get_config(), default=lambda part: type(part).__name__)
    except Exception:  # user-defined, or without a configuration
        return {}
    # Keras numbers names in order of creation; the learning rate's value is broadcast.
    config = json.loads(plain, object_hook=lambda part: {name: value for name, value in part.items() if name != "name"})
    settings = {name: json.dumps(value, sort_keys=True) for name, value in config.items()}
    if isinstance(config.get("learning_rate"), float):
        del settings["learning_rate"]
    return settings


def read_rate(optimizer: Any) -> float | None:
    rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "learning_rate", None)
    try:
        return float(f"{float(rate):.7g}")  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _require_equal(
    values: Sequence[Any], ranks: Sequence[int], what: str, remedy: str, error: type[RingtrainError] = UsageError
) -> None:
    if len(set(values)) > 1:
        raise error(f"the ranks have different {what} ({_list_values(values, ranks)}). {remedy}")


def _list_values(values: Sequence[Any], ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}: {'unknown' if v is None else v}" for rank, v in zip(ranks, values, strict=True))


NUM_BATCHES = 3
HASHED_VALUES = 2**18
MAX_HELD = 16  # per call of the training function, all in memory


class FirstBatches:
    """A separate iterator feeds them to the training function: a hash within the step would run in every step."""

    def __init__(self) -> None:
        self.hashes: list[str] = []
        self.batch_spec: Any = None  # tf.TensorSpec of a batch of this fit
        self.is_in_fit = self._is_awaited = False

    def begin(self) -> None:
        self.hashes, self.is_in_fit, self._is_awaited = [], True, False
        self.batch_spec = None

    def end(self) -> None:
        """A user's own loop may validate next."""
        self.is_in_fit = self._is_awaited = False

    def wait(self) -> None:
        """Validation comes later."""
        self._is_awaited = self.is_in_fit and len(self.hashes) < NUM_BATCHES

    def note(self, steps: Iterator[Any], steps_per_call: int) -> Iterator[Any]:
        is_awaited, self._is_awaited = self._is_awaited, False
        return self._note(steps, steps_per_call) if is_awaited and steps_per_call <= MAX_HELD else steps

    def _note(self, steps: Iterator[Any], steps_per_call: int) -> Iterator[Any]:
        for *numbers, iterator in steps:
            is_due = len(self.hashes) < NUM_BATCHES and _is_plain(iterator)
            yield *numbers, self._note_next(iterator, steps_per_call) if is_due else iterator

    def _note_next(self, iterator: Any, number: int) -> Any:
        """Keeps no reference to the batches."""
        batches = list(itertools.islice(iterator, number))
        self.hashes = [*self.hashes, *map(_hash, batches)][:NUM_BATCHES]
        if not batches:
            return iterator
        again = tf.data.Dataset.from_generator(batches.copy, output_signature=iterator.element_spec)
        return iter(without_tuner(again))


def _is_plain(iterator: Any) -> bool:
    parts = tf.nest.flatten(getattr(iterator, "element_spec", None))
    return isinstance(iterator, tf.data.Iterator) and all(type(part) is tf.TensorSpec for part in parts)


def _hash(batch: Any) -> str:
    arrays = map(np.asarray, tf.nest.flatten(batch))
    first = (bytes_of(array.reshape(-1)[:HASHED_VALUES]) for array in arrays)
    return hashlib.blake2b(b"".join(first), digest_size=8).hexdigest()


@functools.cache
def first_batches() -> FirstBatches:
    return FirstBatches()


def find_same(hashes: Sequence[Sequence[str]]) -> list[int]:
    """Ranks with equal hashes [ranks, batches]; empty if a rank's batches are all equal, as in a benchmark."""
    telling = [tuple(its) for its in hashes if len({*its}) == NUM_BATCHES]
    twice = next((its for its in telling if telling.count(its) > 1), None)
    return [rank for rank, its in enumerate(hashes) if tuple(its) == twice]


@functools.cache
def warn_of_same(ranks: tuple[int, ...]) -> None:
    log.warning(
        "ringtrain.keras: %s had the very same data in each of the first %d batches of fit(): they "
        "train on the same samples. Give each rank its own, such as by dataset.shard(hvd.size(), hvd.rank()) before "
        "shuffle and batch, or by a part of the arrays.",
        name_ranks(ranks),
        NUM_BATCHES,
    )
